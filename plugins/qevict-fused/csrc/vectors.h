// Eight numbers at once, in the vector extensions of GCC and Clang: each including file decides for which instructions.
// Everything is static or a template of this file, so that no function of one instruction set is linked into another.
// For the same reason headers are included before the instruction set is chosen.

#define QEVICT_INLINE static inline __attribute__((always_inline))
#define QEVICT_MEMBER inline __attribute__((always_inline))
#if defined(QEVICT_AVX2) && defined(__clang__)
#define QEVICT_UNROLL _Pragma("unroll")
#elif defined(QEVICT_AVX2)
#define QEVICT_UNROLL _Pragma("GCC unroll 8")
#else
#define QEVICT_UNROLL
#endif

typedef float F8 __attribute__((vector_size(32)));
typedef float F8Anywhere __attribute__((vector_size(32), aligned(1), may_alias));
typedef double D8 __attribute__((vector_size(64)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint64_t L4 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

QEVICT_INLINE F8 all(float x) { return F8{x, x, x, x, x, x, x, x}; }

QEVICT_INLINE F8 load(const float* from) { return *reinterpret_cast<const F8Anywhere*>(from); }

QEVICT_INLINE void store(float* to, F8 x) { *reinterpret_cast<F8Anywhere*>(to) = x; }

QEVICT_INLINE F8 as_floats(U8 x) { return (F8)x; }

QEVICT_INLINE F8 larger(F8 a, F8 b) { return a > b ? a : b; }

QEVICT_INLINE F8 from_half(H8 halves) {
#if defined(QEVICT_AVX2)
  return (F8)_mm256_cvtph_ps((__m128i)halves);
#else
  const U8 bits = __builtin_convertvector(halves, U8);
  const U8 magnitude = (bits & 0x7fffu) << 13;
  // The exponent of a half is 112 less than that of a float; this also serves subnormal halves.
  const U8 number = (U8)((F8)magnitude * all(0x1p112f));
  const U8 special = (U8)(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  return as_floats(number | special | ((bits & 0x8000u) << 16));
#endif
}

QEVICT_INLINE F8 from_bfloat(H8 bits) { return as_floats(__builtin_convertvector(bits, U8) << 16); }

template <Number number>
QEVICT_INLINE F8 load_as(const char* from, int64_t index) {
  if constexpr (number == Number::float32) {
    return load(reinterpret_cast<const float*>(from) + index);
  } else {
    H8 bits;
    __builtin_memcpy(&bits, from + 2 * index, sizeof bits);
    return number == Number::float16 ? from_half(bits) : from_bfloat(bits);
  }
}

QEVICT_INLINE float load_one(const char* from, Number number, int64_t index) {
  if (number == Number::float32) {
    float x;
    __builtin_memcpy(&x, from + 4 * index, sizeof x);
    return x;
  }
  H8 bits{};
  uint16_t one;
  __builtin_memcpy(&one, from + 2 * index, sizeof one);
  bits[0] = one;
  return (number == Number::float16 ? from_half(bits) : from_bfloat(bits))[0];
}

// Sums of eight vectors, one in each lane.
QEVICT_INLINE F8 sums(const F8 (&x)[8]) {
#define QEVICT_PAIR(a, b) \
  (__builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#define QEVICT_FOUR(a, b) \
  (__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
  const F8 low = QEVICT_FOUR(QEVICT_PAIR(x[0], x[1]), QEVICT_PAIR(x[2], x[3]));
  const F8 high = QEVICT_FOUR(QEVICT_PAIR(x[4], x[5]), QEVICT_PAIR(x[6], x[7]));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

QEVICT_INLINE float sum(F8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

QEVICT_INLINE F8 nearest(F8 x) { return (x + all(12582912.0f)) - all(12582912.0f); }

// exp(x) for x <= 0, within two units of the last place; 0 below -87; no number stays none.
QEVICT_INLINE F8 exponential(F8 x) {
  const I8 nothing = x < all(-87.0f);
  x = nothing ? all(-87.0f) : x;
  const F8 n = nearest(x * all(1.44269504f));
  F8 r = x - n * all(0.693359375f);
  r = r - n * all(-2.12194440e-4f);
  F8 p = all(1.9875691500e-4f);
  p = p * r + all(1.3981999507e-3f);
  p = p * r + all(8.3334519073e-3f);
  p = p * r + all(4.1665795894e-2f);
  p = p * r + all(1.6666665459e-1f);
  p = p * r + all(5.0000001201e-1f);
  const F8 y = p * r * r + r + all(1.0f);
  const I8 power = (__builtin_convertvector(n, I8) + 127) << 23;
  return as_floats((U8)(y * (F8)power) & ~(U8)nothing);
}

// Cosine and sine of angles of up to six million; the quarter turns are taken off in double precision.
QEVICT_INLINE void turn(F8 angle, F8& cosine, F8& sine) {
  const F8 quarters = nearest(angle * all(0.636619772f));
  const D8 rest = __builtin_convertvector(angle, D8) - __builtin_convertvector(quarters, D8) * 1.5707963267948966;
  const F8 r = __builtin_convertvector(rest, F8);
  const F8 square = r * r;
  F8 s = all(-1.9515295891e-4f);
  s = s * square + all(8.3321608736e-3f);
  s = s * square + all(-1.6666654611e-1f);
  s = s * square * r + r;
  F8 c = all(2.443315711809948e-5f);
  c = c * square + all(-1.388731625493765e-3f);
  c = c * square + all(4.166664568298827e-2f);
  c = c * square * square - square * all(0.5f) + all(1.0f);
  const I8 quarter = __builtin_convertvector(quarters, I8);
  const U8 swapped = (U8)((quarter & 1) != 0);
  const U8 of_sine = ((U8)c & swapped) | ((U8)s & ~swapped);
  const U8 of_cosine = ((U8)s & swapped) | ((U8)c & ~swapped);
  sine = as_floats(of_sine ^ ((U8)(quarter & 2) << 30));
  cosine = as_floats(of_cosine ^ ((U8)((quarter + 1) & 2) << 30));
}
