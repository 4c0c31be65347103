// FASTMLM_SOURCE compiled once for each instruction set: in a namespace of its own, under its target options, with
// FASTMLM_AVX512, FASTMLM_AVX2 or neither defined. It leaves its functions there in a `kKernels`, which FASTMLM_OF_ISA(isa)
// points to afterwards.
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Clang and GCC name the same thing differently: "the functions that follow may use these instructions".
#if defined(__clang__)
#define FASTMLM_PRAGMA(x) _Pragma(#x)
#define FASTMLM_TARGET(features) \
  FASTMLM_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define FASTMLM_TARGET_END _Pragma("clang attribute pop")
#else
#define FASTMLM_PRAGMA(x) _Pragma(#x)
#define FASTMLM_TARGET(features) FASTMLM_PRAGMA(GCC push_options) FASTMLM_PRAGMA(GCC target(features))
#define FASTMLM_TARGET_END _Pragma("GCC pop_options")
#endif

namespace fastmlm {

namespace plain {
#include FASTMLM_SOURCE
}  // namespace plain

#if defined(__x86_64__)

#define FASTMLM_AVX2
FASTMLM_TARGET("avx2,bmi,bmi2,fma")
namespace avx2 {
#include FASTMLM_SOURCE
}  // namespace avx2
FASTMLM_TARGET_END
#undef FASTMLM_AVX2

#define FASTMLM_AVX512
FASTMLM_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx2,bmi,bmi2,fma")
namespace avx512 {
#include FASTMLM_SOURCE
}  // namespace avx512
FASTMLM_TARGET_END
#undef FASTMLM_AVX512

#define FASTMLM_OF_ISA(isa) \
  ((isa) == Isa::avx512 ? &avx512::kKernels : (isa) == Isa::avx2 ? &avx2::kKernels : &plain::kKernels)

#else
#define FASTMLM_OF_ISA(isa) ((void)(isa), &plain::kKernels)
#endif

}  // namespace fastmlm
