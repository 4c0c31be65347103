// The masking kernels, compiled once for each instruction set from one source: masking.inc over isa.h.
#include "masking.h"

#include <algorithm>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#define FASTMLM_X86 1
#endif

// Clang and GCC name the same thing differently: "the functions that follow may use these instructions".
#if defined(__clang__)
#define FASTMLM_PRAGMA(x) _Pragma(#x)
#define FASTMLM_TARGET(features) \
  FASTMLM_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define FASTMLM_TARGET_END _Pragma("clang attribute pop")
#else
#define FASTMLM_PRAGMA(x) _Pragma(#x)
#define FASTMLM_TARGET(features) FASTMLM_PRAGMA(GCC push_options) FASTMLM_PRAGMA(GCC target(features))
#define FASTMLM_TARGET_END _Pragma("GCC pop_options")
#endif

namespace fastmlm {

#define FASTMLM_ISA_NAME "plain"
namespace plain {
#include "isa.h"
#include "masking.inc"
}  // namespace plain
#undef FASTMLM_ISA_NAME

const Kernels* kernels_plain() { return &plain::kKernels; }

#if defined(FASTMLM_X86)

#define FASTMLM_ISA_NAME "avx2"
#define FASTMLM_AVX2
FASTMLM_TARGET("avx2,bmi,bmi2")
namespace avx2 {
#include "isa.h"
#include "masking.inc"
}  // namespace avx2
FASTMLM_TARGET_END
#undef FASTMLM_AVX2
#undef FASTMLM_ISA_NAME

#define FASTMLM_ISA_NAME "avx512"
#define FASTMLM_AVX512
FASTMLM_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx2,bmi,bmi2")
namespace avx512 {
#include "isa.h"
#include "masking.inc"
}  // namespace avx512
FASTMLM_TARGET_END
#undef FASTMLM_AVX512
#undef FASTMLM_ISA_NAME

const Kernels* kernels_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") ? &avx2::kKernels : nullptr;
}
const Kernels* kernels_avx512() {
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return has ? &avx512::kKernels : nullptr;
}

#else

const Kernels* kernels_avx2() { return nullptr; }
const Kernels* kernels_avx512() { return nullptr; }

#endif

}  // namespace fastmlm
