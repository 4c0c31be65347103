// What the loss of a linear layer does beside its matrix products: the cross-entropy of rows of logits, which become
// gradients where they are, and sums of bfloat16 products.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fastmlm {

struct Logits {
  void* data;         // (rows, vocab_size), float32 or bfloat16; gradients of sum(scale * loss) afterwards, if asked for
  bool half;          // bfloat16
  const float* bias;  // to be added to each row; null: none
  const int64_t* targets;
  const float* scale;
  float* losses;     // out
  float* bias_grad;  // to which the gradients of all rows are added; null: not asked for
  int64_t* ranks;    // out: how many ids beat the target; null: not asked for
  int64_t rows;
  int64_t vocab_size;
  double label_smoothing;
  bool gradients;  // else the logits stay as they are
};

// Sums of bfloat16 numbers: the upper 24 bits of float32, that is 16 of precision where the result has 8. They lie in two
// arrays, the first of which is the result in the end, without another array to round into.
struct Sums {
  uint16_t* high;
  uint8_t* low;
  int64_t count;
};

// Work is shared out to so many threads at most, those of the process's OpenMP.
// Throws std::bad_alloc before anything is written.
void cross_entropy(const Logits& logits, int threads, Isa isa);
void add(const Sums& to, const uint16_t* numbers, int threads, Isa isa);
void round_to_high(const Sums& sums, int threads, Isa isa);

}  // namespace fastmlm
