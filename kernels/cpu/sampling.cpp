// sampling.inc for each instruction set, and the threads that share out its rows.
#include "sampling.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "parallel.h"

namespace fastmlm {

struct SamplingKernels {
  void (*sample)(const SampledLogits&, int64_t first, int64_t last);
};

}  // namespace fastmlm

#define FASTMLM_SOURCE "sampling.inc"
#include "each_isa.h"

namespace fastmlm {

void sample_tokens(const SampledLogits& logits, int threads, Isa isa) {
  constexpr int64_t kWorthAThread = 1 << 15;  // logits: some 10 µs
  const int64_t worth = logits.rows * logits.vocab_size / kWorthAThread;
  // More parts than threads would be of no use, and fewer rows than threads leave some without work.
  const int64_t parts = std::max<int64_t>(1, std::min({static_cast<int64_t>(threads), worth, logits.rows}));
  const SamplingKernels& kernels = *FASTMLM_OF_ISA(isa);
  in_parts(logits.rows, parts, [&](int64_t, int64_t first, int64_t last) { kernels.sample(logits, first, last); });
}

}  // namespace fastmlm
