// What the masking kernels of all instruction sets take: one batch, padded or packed, as rows of tokens in memory.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fastmlm {

// A mask of one value a token, of any integer type: only whether a value is 0 counts. Null: none was given.
struct Flags {
  const uint8_t* data = nullptr;
  int itemsize = 1;

  bool at(int64_t i) const {
    switch (itemsize) {
      case 1: return data[i] != 0;
      case 2: return reinterpret_cast<const uint16_t*>(data)[i] != 0;
      case 4: return reinterpret_cast<const uint32_t*>(data)[i] != 0;
      default: return reinterpret_cast<const uint64_t*>(data)[i] != 0;
    }
  }
};

struct Batch {
  const void* input_ids;  // int64 or int32, as id_size says; the two outputs likewise
  void* output_ids;       // may be input_ids: masked in place
  void* labels;
  int id_size;
  int64_t rows;
  int64_t length;           // of a padded row
  const int64_t* offsets;   // packed: where rows start, rows + 1 of them; null: padded
  uint64_t key;
  const uint64_t* row_keys;  // null: the index of the row
  Flags attention_mask;
  Flags special_tokens_mask;
  const int64_t* units;       // null: each token is its own
  const int64_t* thresholds;  // null: the one threshold
  bool threshold_per_token;   // else one a row
  const uint8_t* id_flags;    // by id: bit 0 special, bit 1 in the random table
  int64_t vocab_size;
  const int64_t* random_ids;  // null: all of [0, vocab_size)
  int64_t random_count;
  uint64_t threshold;
  uint64_t mask_threshold;
  uint64_t random_threshold;
  int64_t mask_token_id;
  int64_t ignore_index;
  bool exclude_original;
};

// Masks the batch; returns whether all ids lie in [0, vocab_size). If not, what was written is of no use, and in place
// nothing was. Scratch holds a draw for each token of the longest row, rounded up to 64, and is used with units and with
// thresholds of single tokens.
using MaskTokens = bool (*)(const Batch&, uint32_t* scratch);
// The row keys of the draw law, of padded rows; weights[s] is the multiplier of position s.
using RowKeys = void (*)(const void* ids, int id_size, const Flags& attention_mask, const uint64_t* weights,
                         int64_t rows, int64_t length, uint64_t* keys);

struct MaskingKernels {
  MaskTokens mask_tokens;
  RowKeys row_keys;
};

const MaskingKernels& masking_kernels(Isa isa);

}  // namespace fastmlm
