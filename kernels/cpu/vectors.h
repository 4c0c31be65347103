// One instruction set: what the vector code of masking.inc needs, and nothing else.
//
// A vector holds one Philox word a 64-bit lane, in its low half; the high half may hold anything, since the widening
// multiply reads the low half alone. The same word of 16 Philox blocks fills kParts vectors: one draw for each of 16
// neighbouring positions, which `at_most` compares and `store` writes as 32-bit numbers; `at_most` compares 16 of those too.
// `bits_of` gathers one bit of each of 64 bytes, and `deposit` spreads the lowest bits of a word over the bits set in another,
// as the instruction PDEP does. Included by masking.inc.

#if defined(FASTMLM_AVX512)

constexpr int kLanes = 8;
using Vector = __m512i;

static inline Vector splat(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
static inline Vector load(const uint64_t* x) { return _mm512_loadu_si512(x); }
// Old GCCs warn of the undefined operand inside the forms of these without a mask; they make the same instructions.
static inline Vector multiply(Vector x, Vector y) { return _mm512_maskz_mul_epu32(0xFF, x, y); }
static inline Vector high(Vector x) { return _mm512_maskz_srli_epi64(0xFF, x, 32); }
static inline Vector either(Vector x, Vector y) { return _mm512_or_si512(x, y); }
static inline Vector xor3(Vector x, Vector y, Vector z) { return _mm512_ternarylogic_epi64(x, y, z, 0x96); }
static inline __m512i narrow(const Vector (&x)[2]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return _mm512_permutex2var_epi32(x[0], even, x[1]);
}
// Bit i is set where draw i is no larger than the limit.
static inline uint32_t at_most(const Vector (&x)[2], uint32_t limit) {
  return _mm512_cmple_epu32_mask(narrow(x), _mm512_set1_epi32(static_cast<int>(limit)));
}
static inline uint32_t at_most(const uint32_t* x, uint32_t limit) {
  return _mm512_cmple_epu32_mask(_mm512_loadu_si512(x), _mm512_set1_epi32(static_cast<int>(limit)));
}
static inline void store(uint32_t* to, const Vector (&x)[2]) { _mm512_storeu_si512(to, narrow(x)); }
template <int kBit>
static inline uint64_t bits_of(const uint8_t* bytes) {
  return _mm512_test_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(1 << kBit));
}
static inline uint64_t deposit(uint64_t bits, uint64_t places) { return _pdep_u64(bits, places); }

#elif defined(FASTMLM_AVX2)

constexpr int kLanes = 4;
using Vector = __m256i;

static inline Vector splat(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
static inline Vector load(const uint64_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
static inline Vector multiply(Vector x, Vector y) { return _mm256_mul_epu32(x, y); }
static inline Vector high(Vector x) { return _mm256_srli_epi64(x, 32); }
static inline Vector either(Vector x, Vector y) { return _mm256_or_si256(x, y); }
static inline Vector xor3(Vector x, Vector y, Vector z) { return _mm256_xor_si256(_mm256_xor_si256(x, y), z); }
static inline __m256i narrow(Vector x, Vector y) {
  const __m256 low = _mm256_shuffle_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(y), _MM_SHUFFLE(2, 0, 2, 0));
  return _mm256_permute4x64_epi64(_mm256_castps_si256(low), _MM_SHUFFLE(3, 1, 2, 0));
}
// Bit i is set where draw i is no larger than the limit: where the smaller of both is the draw.
static inline uint32_t at_most(__m256i draws, uint32_t limit) {
  const __m256i top = _mm256_set1_epi32(static_cast<int>(limit));
  const __m256i within = _mm256_cmpeq_epi32(_mm256_min_epu32(draws, top), draws);
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(within)));
}
static inline uint32_t at_most(const Vector (&x)[4], uint32_t limit) {
  return at_most(narrow(x[0], x[1]), limit) | at_most(narrow(x[2], x[3]), limit) << 8;
}
static inline uint32_t at_most(const uint32_t* x, uint32_t limit) {
  const __m256i* from = reinterpret_cast<const __m256i*>(x);
  return at_most(_mm256_loadu_si256(from), limit) | at_most(_mm256_loadu_si256(from + 1), limit) << 8;
}
static inline void store(uint32_t* to, const Vector (&x)[4]) {
  for (int i = 0; i < 2; ++i)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + i, narrow(x[2 * i], x[2 * i + 1]));
}
template <int kBit>
static inline uint64_t bits_of(const uint8_t* bytes) {
  uint64_t bits = 0;
  for (int i = 0; i < 2; ++i) {  // the instruction takes the highest bit of a byte
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes) + i);
    const int found = _mm256_movemask_epi8(_mm256_slli_epi16(half, 7 - kBit));
    bits |= static_cast<uint64_t>(static_cast<uint32_t>(found)) << (32 * i);
  }
  return bits;
}
static inline uint64_t deposit(uint64_t bits, uint64_t places) { return _pdep_u64(bits, places); }

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
static inline Vector either(const Vector& x, const Vector& y) {
  return lanewise([&](int i) { return x.lane[i] | y.lane[i]; });
}
static inline Vector xor3(const Vector& x, const Vector& y, const Vector& z) {
  return lanewise([&](int i) { return x.lane[i] ^ y.lane[i] ^ z.lane[i]; });
}
static inline uint32_t at_most(const Vector (&x)[4], uint32_t limit) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(static_cast<uint32_t>(x[i / 4].lane[i % 4]) <= limit) << i;
  return bits;
}
static inline void store(uint32_t* to, const Vector (&x)[4]) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<uint32_t>(x[i / 4].lane[i % 4]);
}
static inline uint32_t at_most(const uint32_t* x, uint32_t limit) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(x[i] <= limit) << i;
  return bits;
}
template <int kBit>
static inline uint64_t bits_of(const uint8_t* bytes) {
  uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) {
    uint64_t word = 0;
    for (int j = 0; j < 8; ++j) word |= static_cast<uint64_t>(bytes[8 * i + j]) << (8 * j);
    // The product brings the lowest bit of byte j to bit 56 + j.
    bits |= ((word >> kBit & 0x0101010101010101u) * 0x0102040810204080u >> 56) << (8 * i);
  }
  return bits;
}
static inline uint64_t deposit(uint64_t bits, uint64_t places) {
  if (places == ~uint64_t{0}) return bits;
  uint64_t spread = 0;
  for (; places; places &= places - 1, bits >>= 1) spread |= (places & (~places + 1)) * (bits & 1);
  return spread;
}

#endif
