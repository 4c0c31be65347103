// The masking kernels, compiled once for each instruction set from one source: masking.inc and what it includes, over
// vectors.h.
#include "masking.h"

#include <algorithm>
#include <cmath>
#include <limits>

#define FASTMLM_SOURCE "masking.inc"
#include "each_isa.h"

namespace fastmlm {

const MaskingKernels& masking_kernels(Isa isa) { return *FASTMLM_OF_ISA(isa); }

}  // namespace fastmlm
