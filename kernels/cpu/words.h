// Whole words from the vocabulary: which token starts the word of each token.
#pragma once

#include "masking.h"

namespace fastmlm {

// units[i] = the position, counted from the row's first real token, of the first token of i's word; 0 before the row's first.
// A word starts at a token whose mark has bit 0, after one whose mark has bit 1, at a special token (ids by id_flags, or by
// a mask) and after it; padding counts as special. Ids outside [0, vocab_size) are taken for the nearest id inside.
// `attention` is the attention mask, or null.
template <class Id, class Mask>
void word_units(const Id* ids, const uint8_t* id_flags, const uint8_t* marks, int64_t vocab_size, const Mask* attention,
                const Flags& special_tokens_mask, int64_t rows, int64_t length, int64_t* units) {
  for (int64_t at = 0; at < rows * length; at += length) {
    int64_t first_real = 0, start = 0;
    if (attention) {
      while (first_real < length && !attention[at + first_real]) ++first_real;
      if (first_real == length) first_real = 0;
    }
    unsigned after_end = 1;
    for (int64_t i = 0; i < length; ++i) {
      const int64_t raw = ids[at + i], low = raw < 0 ? 0 : raw, id = low < vocab_size ? low : vocab_size - 1;
      unsigned special = id_flags[id] & 1;
      if (attention) special |= attention[at + i] == 0;
      if (special_tokens_mask.data) special |= special_tokens_mask.at(at + i);
      const unsigned mark = marks[id], starts = special | after_end | (mark & 1);
      start = starts ? i : start;
      after_end = special | (mark >> 1 & 1);
      const int64_t position = start - first_real;
      units[at + i] = position > 0 ? position : 0;
    }
  }
}

template <class Id>
void word_units(const Id* ids, const uint8_t* id_flags, const uint8_t* marks, int64_t vocab_size,
                const Flags& attention_mask, const Flags& special_tokens_mask, int64_t rows, int64_t length,
                int64_t* units) {
  const auto run = [&](auto* attention) {
    word_units(ids, id_flags, marks, vocab_size, attention, special_tokens_mask, rows, length, units);
  };
  switch (attention_mask.itemsize) {
    case 1: return run(attention_mask.data);
    case 2: return run(reinterpret_cast<const uint16_t*>(attention_mask.data));
    case 4: return run(reinterpret_cast<const uint32_t*>(attention_mask.data));
    default: return run(reinterpret_cast<const uint64_t*>(attention_mask.data));
  }
}

// Whether no real token's unit starts before its row's first real token, or after the token itself.
inline bool units_fit(const int64_t* units, const Flags& attention_mask, int64_t rows, int64_t length) {
  for (int64_t at = 0; at < rows * length; at += length) {
    int64_t first_real = 0;
    if (attention_mask.data)
      while (first_real < length && !attention_mask.at(at + first_real)) ++first_real;
    uint64_t outside = 0;  // below 0 where a unit is, or is beyond its token's position
    for (int64_t i = first_real; i < length; ++i) {
      const uint64_t unit = static_cast<uint64_t>(units[at + i]);
      outside |= unit | (static_cast<uint64_t>(i - first_real) - unit);
    }
    if (static_cast<int64_t>(outside) >= 0) continue;
    for (int64_t i = first_real; i < length; ++i) {  // only those of real tokens count
      const bool fits = static_cast<uint64_t>(units[at + i]) <= static_cast<uint64_t>(i - first_real);
      if (!fits && (!attention_mask.data || attention_mask.at(at + i))) return false;
    }
  }
  return true;
}

}  // namespace fastmlm
