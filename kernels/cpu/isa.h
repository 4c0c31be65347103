// One instruction set: what the vector code of masking.inc needs, and nothing else.
//
// A vector holds one Philox word a 64-bit lane, in its low half; the high half may hold anything, since the widening
// multiply reads the low half alone. This file is included once for each instruction set, inside its namespace and
// under its target options, with FASTMLM_AVX512, FASTMLM_AVX2 or neither defined.

#if defined(FASTMLM_AVX512)

constexpr int kLanes = 8;
using Vector = __m512i;

static inline Vector splat(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
static inline Vector load(const uint64_t* x) { return _mm512_loadu_si512(x); }
static inline Vector multiply(Vector x, Vector y) { return _mm512_mul_epu32(x, y); }
static inline Vector high(Vector x) { return _mm512_srli_epi64(x, 32); }
static inline Vector low(Vector x) { return _mm512_and_si512(x, splat(0xFFFFFFFFu)); }
static inline Vector xor3(Vector x, Vector y, Vector z) { return _mm512_ternarylogic_epi64(x, y, z, 0x96); }
// Bit i is set where lane i of x is below lane i of y.
static inline uint32_t below(Vector x, Vector y) { return _mm512_cmplt_epu64_mask(x, y); }
static inline void store_low(uint32_t* to, Vector x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi64_epi32(x));
}

#elif defined(FASTMLM_AVX2)

constexpr int kLanes = 4;
using Vector = __m256i;

static inline Vector splat(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
static inline Vector load(const uint64_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
static inline Vector multiply(Vector x, Vector y) { return _mm256_mul_epu32(x, y); }
static inline Vector high(Vector x) { return _mm256_srli_epi64(x, 32); }
static inline Vector low(Vector x) { return _mm256_and_si256(x, splat(0xFFFFFFFFu)); }
static inline Vector xor3(Vector x, Vector y, Vector z) { return _mm256_xor_si256(_mm256_xor_si256(x, y), z); }
// The signed comparison serves: both sides are below 2^33.
static inline uint32_t below(Vector x, Vector y) {
  return static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(y, x))));
}
static inline void store_low(uint32_t* to, Vector x) {
  const __m256i packed = _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

#else  // portable C++, which compilers turn into what vector instructions the target always has

constexpr int kLanes = 4;
struct Vector {
  uint64_t lane[kLanes];
};

template <class F>
static inline Vector lanewise(F f) {
  Vector r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = f(i);
  return r;
}
static inline Vector splat(uint64_t x) {
  return lanewise([=](int) { return x; });
}
static inline Vector load(const uint64_t* x) {
  return lanewise([=](int i) { return x[i]; });
}
static inline Vector multiply(const Vector& x, const Vector& y) {
  return lanewise([&](int i) { return (x.lane[i] & 0xFFFFFFFFu) * (y.lane[i] & 0xFFFFFFFFu); });
}
static inline Vector high(const Vector& x) {
  return lanewise([&](int i) { return x.lane[i] >> 32; });
}
static inline Vector low(const Vector& x) {
  return lanewise([&](int i) { return x.lane[i] & 0xFFFFFFFFu; });
}
static inline Vector xor3(const Vector& x, const Vector& y, const Vector& z) {
  return lanewise([&](int i) { return x.lane[i] ^ y.lane[i] ^ z.lane[i]; });
}
static inline uint32_t below(const Vector& x, const Vector& y) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(x.lane[i] < y.lane[i]) << i;
  return bits;
}
static inline void store_low(uint32_t* to, const Vector& x) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint32_t>(x.lane[i]);
}

#endif
