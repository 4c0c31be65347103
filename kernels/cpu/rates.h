// Rates as thresholds of 32-bit draws.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastmlm {

// thresholds[i] = rates[i] * 2^32, rounded half to even; returns whether all rates lie in [0, 1], else what was written is of
// no use. Rate is float or double.
template <class Rate>
bool thresholds_of(const Rate* rates, int64_t count, int64_t* thresholds) {
  bool inside = true;
  for (int64_t i = 0; i < count; ++i) {
    const double rate = rates[i], clamped = rate >= 0 && rate <= 1 ? rate : 0;
    inside &= clamped == rate;
    // Doubles from 2^52 on are whole numbers, which their lowest bits hold: adding rounds as the law does.
    const double shifted = clamped * 0x1p32 + 0x1p52;
    int64_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    thresholds[i] = bits - 0x4330000000000000;
  }
  return inside;
}

}  // namespace fastmlm
