// Units as they come from outside: the position of the first token of each token's word or span.
#pragma once

#include "masking.h"

namespace fastmlm {

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
