// Memory that Python gives as addresses.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastmlm {

template <class T>
const T* pointer(unsigned long long address) {
  return reinterpret_cast<const T*>(static_cast<uintptr_t>(address));
}

template <class T>
T* writable(unsigned long long address) {
  return const_cast<T*>(pointer<T>(address));
}

// Ask for huge pages behind a large buffer about to be written for the first time: touching it in pages of 4 KB costs
// more than masking does. It is a hint, and a refusal does no harm.
inline void expect_writes(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const uintptr_t from = (reinterpret_cast<uintptr_t>(start) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(start) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (bytes > 0 && from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

}  // namespace fastmlm
