// Whole words from the vocabulary: which token starts the word of each token.
#pragma once

#include "masking.h"

namespace fastmlm {

// units[i] = the position, counted from the row's first real token, of the first token of i's word; 0 before the row's first.
// A word starts at a token whose mark has bit 0, after one whose mark has bit 1, at a special token (ids by id_flags, or by
// a mask) and after it; padding counts as special. Ids outside [0, vocab_size) are taken for the nearest id inside.
template <class Id>
void word_units(const Id* ids, const uint8_t* id_flags, const uint8_t* marks, int64_t vocab_size,
                const Flags& attention_mask, const Flags& special_tokens_mask, int64_t rows, int64_t length,
                int64_t* units) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = r * length;
    int64_t first_real = 0, start = 0;
    if (attention_mask.data) {
      while (first_real < length && !attention_mask.at(at + first_real)) ++first_real;
      if (first_real == length) first_real = 0;
    }
    bool after_end = true;
    for (int64_t i = 0; i < length; ++i) {
      const int64_t raw = ids[at + i], id = raw < 0 ? 0 : raw < vocab_size ? raw : vocab_size - 1;
      bool special = id_flags[id] & 1;
      if (attention_mask.data) special |= !attention_mask.at(at + i);
      if (special_tokens_mask.data) special |= special_tokens_mask.at(at + i);
      if (special || after_end || (marks[id] & 1)) start = i;
      after_end = special || (marks[id] & 2);
      units[at + i] = start > first_real ? start - first_real : 0;
    }
  }
}

// Whether no real token's unit starts before its row's first real token, or after the token itself.
inline bool units_fit(const int64_t* units, const Flags& attention_mask, int64_t rows, int64_t length) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = r * length;
    int64_t i = 0;
    if (attention_mask.data)
      while (i < length && !attention_mask.at(at + i)) ++i;
    const int64_t first_real = i;
    for (; i < length; ++i) {
      // As unsigned numbers, negative units are the largest.
      const bool fits = static_cast<uint64_t>(units[at + i]) <= static_cast<uint64_t>(i - first_real);
      if (!fits && (!attention_mask.data || attention_mask.at(at + i))) return false;
    }
  }
  return true;
}

}  // namespace fastmlm
