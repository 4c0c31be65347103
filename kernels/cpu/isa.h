// The instruction sets that kernels are compiled for.
#pragma once

namespace fastmlm {

enum class Isa { plain, avx2, avx512 };

constexpr Isa kWidestFirst[] = {Isa::avx512, Isa::avx2, Isa::plain};

inline const char* name_of(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "plain"; }

// Whether this processor has what the kernels of an instruction set need.
inline bool supported(Isa isa) {
  if (isa == Isa::plain) return true;
#if defined(__x86_64__)
  if (isa == Isa::avx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace fastmlm
