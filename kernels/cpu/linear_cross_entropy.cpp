// linear_cross_entropy.inc for each instruction set, and the threads that share out its work.
#include "linear_cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"

namespace fastmlm {

struct LossKernels {
  void (*losses)(const Logits&, float* bias_grad, int64_t first, int64_t last);
  void (*add)(const Sums&, const uint16_t* numbers, int64_t first, int64_t last);
  void (*round_to_high)(const Sums&, int64_t first, int64_t last);
};

}  // namespace fastmlm

#define FASTMLM_SOURCE "linear_cross_entropy.inc"
#include "each_isa.h"

namespace fastmlm {
namespace {

// Numbers that are worth another thread: some 5 µs.
constexpr int64_t kWorthAThread = 1 << 13;

int64_t parts_of(int64_t items, int64_t numbers, int threads) {
  return std::max<int64_t>(1, std::min({static_cast<int64_t>(threads), numbers / kWorthAThread, items}));
}

}  // namespace

void cross_entropy(const Logits& logits, int threads, Isa isa) {
  const int64_t size = logits.vocab_size, parts = parts_of(logits.rows, logits.rows * size, threads);
  const LossKernels& kernels = *FASTMLM_OF_ISA(isa);
  // Each part sums up gradients of its own, from nothing, so that errors do not grow with the number of calls.
  std::vector<float> sums(logits.bias_grad ? static_cast<size_t>(parts * size) : 0);
  in_parts(logits.rows, parts, [&](int64_t part, int64_t first, int64_t last) {
    kernels.losses(logits, logits.bias_grad ? sums.data() + part * size : nullptr, first, last);
  });
  for (size_t start = 0; start < sums.size(); start += static_cast<size_t>(size))
    for (int64_t i = 0; i < size; ++i) logits.bias_grad[i] += sums[start + static_cast<size_t>(i)];
}

void add(const Sums& to, const uint16_t* numbers, int threads, Isa isa) {
  const LossKernels& kernels = *FASTMLM_OF_ISA(isa);
  in_parts(to.count, parts_of(to.count, to.count, threads),
           [&](int64_t, int64_t first, int64_t last) { kernels.add(to, numbers, first, last); });
}

void round_to_high(const Sums& sums, int threads, Isa isa) {
  const LossKernels& kernels = *FASTMLM_OF_ISA(isa);
  in_parts(sums.count, parts_of(sums.count, sums.count, threads),
           [&](int64_t, int64_t first, int64_t last) { kernels.round_to_high(sums, first, last); });
}

}  // namespace fastmlm
