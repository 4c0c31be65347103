// Work shared out among the threads that the process has anyway.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace fastmlm {

using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

// The OpenMP of the process, which is PyTorch's: its threads go on spinning for a while when a matrix product is done,
// and others would have to share the processors with them. Null where there is none.
inline Parallel openmp() {
#if defined(__unix__) || defined(__APPLE__)
  static const Parallel found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
#else
  return nullptr;
#endif
}

// Calls f(part, first, last) for each of so many parts of [0, items), in as many threads as there are to be had.
template <class F>
void in_parts(int64_t items, int64_t parts, const F& f) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t part; (part = next++) < parts;) f(part, items * part / parts, items * (part + 1) / parts);
  };
  if (parts > 1 && openmp())
    openmp()([](void* data) { (*static_cast<decltype(work)*>(data))(); }, &work, static_cast<unsigned>(parts), 0);
  else
    work();
}

}  // namespace fastmlm
