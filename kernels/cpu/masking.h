// What the masking kernels of all instruction sets take: one batch, padded or packed, as rows of tokens in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

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
  const uint8_t* id_flags;    // by id: bit 0 special, bit 1 in the random table, bit 2 starts a word, bit 3 ends one
  int64_t vocab_size;
  const int64_t* random_ids;  // null: all of [0, vocab_size)
  int64_t random_count;
  uint64_t threshold;
  uint64_t mask_threshold;
  uint64_t random_threshold;
  int64_t mask_token_id;
  int64_t ignore_index;
  bool exclude_original;
  bool words;                    // units are the words that bits 2 and 3 of id_flags tell
  const int64_t* span_limits;    // of a draw: how long a span is; longest_span - 1 of them
  int64_t longest_span;          // 0: no spans
  const int64_t* id_thresholds;  // by id, in place of the other thresholds; null: those
  bool action_per_unit;
  bool exact;  // counts: how many tokens of a row to select
  int64_t at_least_tokens;
  int64_t at_most_tokens;

  bool counted() const { return exact || at_least_tokens > 0 || at_most_tokens < INT32_MAX; }
  // Whether it matters what every token is, and not only what those are that the draws let through.
  bool looks_at_all() const { return words || longest_span || counted(); }
  // Whether every selected token becomes the mask token.
  bool masks_all() const { return mask_threshold >> 32; }
  // Whether each token is its own unit, at one rate a row.
  bool plain() const {
    return !looks_at_all() && !units && !threshold_per_token && !id_thresholds && !action_per_unit;
  }
};

// Memory for one row at a time, the longest of a batch: what the way it is masked needs, one a position, unless said
// otherwise. All of it is written before it is read.
struct Scratch {
  explicit Scratch(const Batch& batch) {  // may throw std::bad_alloc
    if (batch.plain()) return;
    int64_t longest = batch.offsets ? 0 : batch.length;
    for (int64_t r = 0; batch.offsets && r < batch.rows; ++r)
      longest = std::max(longest, batch.offsets[r + 1] - batch.offsets[r]);
    const int64_t blocks = (longest + 63) / 64, n = blocks * 64;
    const bool whole_units = batch.units || batch.words || batch.longest_span;
    make(select, n);
    make(selected, blocks);
    make(starts, blocks);
    if (batch.id_thresholds) make(limits, n);
    if (batch.id_thresholds || batch.threshold_per_token) make(hits, n);
    if (batch.looks_at_all()) {
      make(flags, n);
      if (batch.attention_mask.data) make(padding, n);
      if (batch.special_tokens_mask.data) make(special, n);
      make(selectable, blocks);
    }
    if (whole_units) make(units, n);
    if (batch.action_per_unit) make(action, n);
    if (batch.counted()) make(keys, n);
    if (batch.counted() && whole_units) make(sizes, n);
    if (batch.longest_span) make(spans, n + 64 * (batch.longest_span + 1));
  }

  std::unique_ptr<uint32_t[]> select, action;  // draws
  std::unique_ptr<int64_t[]> limits;           // of the selection draw, by id
  std::unique_ptr<uint8_t[]> hits;             // whether the selection draw is below the limit
  std::unique_ptr<uint8_t[]> flags;            // of the ids
  std::unique_ptr<uint8_t[]> padding, special;  // whether a mask forbids the token
  std::unique_ptr<uint64_t[]> selectable, starts, selected;  // bits, a word for 64 positions
  std::unique_ptr<uint32_t[]> units;           // the first position of the unit
  std::unique_ptr<uint32_t[]> sizes;           // by unit: its selectable tokens
  std::unique_ptr<uint64_t[]> keys;            // units in order
  std::unique_ptr<uint8_t[]> spans;            // by the unit's number: whether a span starts there

 private:
  template <class T>
  static void make(std::unique_ptr<T[]>& memory, int64_t count) {
    memory.reset(new T[static_cast<size_t>(count)]);  // unlike make_unique's, not cleared
  }
};

// Masks the batch; returns whether all ids lie in [0, vocab_size). If not, what was written is of no use, and in place
// nothing was.
using MaskTokens = bool (*)(const Batch&, const Scratch&);
// The row keys of the draw law, of padded rows; weights[s] is the multiplier of position s.
using RowKeys = void (*)(const void* ids, int id_size, const Flags& attention_mask, const uint64_t* weights,
                         int64_t rows, int64_t length, uint64_t* keys);

struct MaskingKernels {
  MaskTokens mask_tokens;
  RowKeys row_keys;
};

const MaskingKernels& masking_kernels(Isa isa);

}  // namespace fastmlm
