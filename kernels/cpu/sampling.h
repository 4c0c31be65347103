// One sample of the softmax of each row of logits.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fastmlm {

struct SampledLogits {
  const void* data;  // float32 or bfloat16, rows of vocab_size, stride apart
  bool half;         // bfloat16
  int64_t rows;
  int64_t vocab_size;
  int64_t stride;
  uint64_t key;
  const uint64_t* row_keys;
  float scale;      // 1 / temperature
  int64_t* tokens;  // out; -1 where logits are NaN or inf, or -inf throughout
};

// In so many threads at most, those of the process's OpenMP.
void sample_tokens(const SampledLogits& logits, int threads, Isa isa);

}  // namespace fastmlm
