// What strategies ask of a batch before it is masked: one draw a row, and how many tokens of a row may be selected.
#pragma once

#include "masking.h"

namespace fastmlm {

// draw_stream(0) of the draw law: word 0 of one Philox4x32-10 block, for one row.
inline uint32_t first_draw(uint64_t key, uint64_t row_key, uint32_t stream) {
  uint32_t c0 = 0, c1 = stream, c2 = static_cast<uint32_t>(row_key), c3 = static_cast<uint32_t>(row_key >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{c0} * 0xD2511F53u, p1 = uint64_t{c2} * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// counts[r] = how many tokens of row r are neither special nor padding nor of an id outside [0, vocab_size).
template <class Id>
void count_selectable(const Id* ids, const uint8_t* id_flags, uint64_t vocab_size, const Flags& attention_mask,
                      const Flags& special_tokens_mask, int64_t rows, int64_t length, int64_t* counts) {
  for (int64_t r = 0; r < rows; ++r) {
    int64_t count = 0;
    for (int64_t i = r * length; i < (r + 1) * length; ++i) {
      const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
      bool selectable = id < vocab_size && !(id_flags[id] & 1);
      if (attention_mask.data) selectable &= attention_mask.at(i);
      if (special_tokens_mask.data) selectable &= !special_tokens_mask.at(i);
      count += selectable;
    }
    counts[r] = count;
  }
}

}  // namespace fastmlm
