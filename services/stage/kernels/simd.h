// Vectors of kWidth floats, 16 with AVX-512 or 8 with AVX2, that give the same bits either way; loads and stores of the
// stored types; e^x and tanh in a fixed order of operations.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

#ifdef __AVX512F__
constexpr int kWidth = 16, kRegisters = 32;
using Floats = __m512;
using Words = __m512i;
using Halves = __m256i;
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where one is no number
inline Words widen(Halves h) { return _mm512_cvtepu16_epi32(h); }
inline Halves narrow(Words w) { return _mm512_cvtepi32_epi16(w); }
inline Floats from_integers(Words w) { return _mm512_cvtepi32_ps(w); }
inline Floats from_half(Halves h) { return _mm512_cvtph_ps(h); }
inline Halves to_half(Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
#else
constexpr int kWidth = 8, kRegisters = 16;
using Floats = __m256;
using Words = __m256i;
using Halves = __m128i;
inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Words widen(Halves h) { return _mm256_cvtepu16_epi32(h); }
inline Halves narrow(Words w) {
  return _mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}
inline Floats from_integers(Words w) { return _mm256_cvtepi32_ps(w); }
inline Floats from_half(Halves h) { return _mm256_cvtph_ps(h); }
inline Halves to_half(Floats x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
#endif

// GCC's element-wise operators need the number of elements.
typedef uint32_t Bits __attribute__((vector_size(4 * kWidth)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

// A sum of integers so far. Without it GCC computes all products of a group before it adds them, and keeps them on the stack.
template <class Vector> inline void settle(Vector& sum) { asm("" : "+v"(sum)); }

template <class To> inline To read(const void* from) { To to; std::memcpy(&to, from, sizeof to); return to; }

inline Floats load(const float* p) { return read<Floats>(p); }
inline Floats load(const BFloat16* p) { return (Floats)((Bits)widen(read<Halves>(p)) << 16); }
inline Floats load(const Float16* p) { return from_half(read<Halves>(p)); }

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline Bits to_nearest_even(Bits u) { return u + 0x7fff + ((u >> 16) & 1); }
inline void store(BFloat16* p, Floats x) {
  Bits u = x == x ? to_nearest_even((Bits)x) : ((Bits)x | 0x400000);  // rounding up must not turn a NaN into -0
  Halves h = narrow((Words)(u >> 16));
  std::memcpy(p, &h, sizeof h);
}
inline void store(Float16* p, Floats x) { Halves h = to_half(x); std::memcpy(p, &h, sizeof h); }

// What a value becomes when it is stored as T and loaded again. A NaN that arithmetic makes stays one when rounded up.
template <class T> inline Floats rounded(Floats x);
template <> inline Floats rounded<float>(Floats x) { return x; }
template <> inline Floats rounded<BFloat16>(Floats x) { return (Floats)(to_nearest_even((Bits)x) & 0xffff0000u); }
template <> inline Floats rounded<Float16>(Floats x) { return from_half(to_half(x)); }

// Of values that `rounded` has returned: they are not rounded again.
template <class T> inline void store_rounded(T* p, Floats x) { store(p, x); }
inline void store_rounded(BFloat16* p, Floats x) {
  const Halves h = narrow((Words)((Bits)x >> 16));
  std::memcpy(p, &h, sizeof h);
}

// Two vectors, one behind the other. Where an instruction rounds to bfloat16, denormals become zeros.
template <class T> inline void store_two(T* p, Floats first, Floats second) {
  store(p, first);
  store(p + kWidth, second);
}
#ifdef __AVX512BF16__
inline void store_two(BFloat16* p, Floats first, Floats second) {
  const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
  std::memcpy(p, &both, sizeof both);
}
#endif

template <class T> inline void store_first(T* p, Floats x, int count) {
  if (count >= kWidth) return store(p, x);
  T all[kWidth];
  store(all, x);
  std::memcpy(p, all, count * sizeof(T));
}

// Reads `count` elements and fills the rest of the vector with zeros.
template <class T> inline Floats load_first(const T* p, int count) {
  if (count >= kWidth) return load(p);
  T all[kWidth] = {};
  std::memcpy(all, p, count * sizeof(T));
  return load(all);
}

// The first `count` lanes and zeros.
inline Floats keep_first(Floats x, int count) {
  if (count >= kWidth) return x;
  float all[kWidth];
  store(all, x);
  return load_first(all, count);
}


// Writes the low byte of each lane, a number from -128 to 127.
inline void store_bytes(char* p, Bits integers) {
#ifdef __AVX512F__
  const __m128i bytes = _mm512_cvtepi32_epi8((Words)integers);
  std::memcpy(p, &bytes, sizeof bytes);
#else
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128((Words)integers), _mm256_extracti128_si256((Words)integers, 1));
  const __m128i bytes = _mm_packs_epi16(halves, halves);
  std::memcpy(p, &bytes, kWidth);
#endif
}

// The lanes so far away: lane and partner change places.
template <int distance, class Vector> inline Vector partners(Vector x) {
  Bits partner;
  for (int lane = 0; lane < kWidth; lane++) partner[lane] = lane ^ distance;
  return __builtin_shuffle(x, partner);
}

// Each lane becomes what `of` makes of all of them, in an order of its own.
template <class Of> inline Bits over_lanes(Bits x, Of of) {
  x = of(x, partners<1>(x)), x = of(x, partners<2>(x)), x = of(x, partners<4>(x));
  if constexpr (kWidth == 16) x = of(x, partners<8>(x));
  return x;
}

// Each lane becomes the sum with, or its difference to, the lane so far away: every second group of `distance` lanes is
// what is taken off.
template <int distance> inline Floats butterfly(Floats x) {
  typedef int32_t Lanes __attribute__((vector_size(4 * kWidth)));
  Lanes partner;
  Bits sign;
  for (int lane = 0; lane < kWidth; lane++) partner[lane] = lane ^ distance, sign[lane] = lane & distance ? 1u << 31 : 0;
  return __builtin_shuffle(x, partner) + (Floats)((Bits)x ^ sign);
}

// e^x for x <= 0, within 2e-7; exactly 0 below -87, so -infinity masks.
inline Floats exp_negative(Floats x) {
  const Floats low = broadcast(-87.f), to_integer = broadcast(12582912.f);
  Floats clamped = larger(low, x);
  Floats n = fma(clamped, broadcast(1.44269504f), to_integer) - to_integer;
  Floats r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691e-4f);
  for (float c : {1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666665e-1f, 5.0000001e-1f})
    p = fma(p, r, broadcast(c));
  p = fma(p * r, r, r) + 1.f;
  Bits power = ((Bits)(n + to_integer) - (Bits)to_integer + 127u) << 23;
  return x < low ? broadcast(0.f) : p * (Floats)power;
}

inline Floats negative(Floats x) { return (Floats)((Bits)x | 0x80000000u); }  // -|x|

// x times the logistic function of y.
inline Floats gated(Floats x, Floats y) {
  const Floats e = exp_negative(negative(y));  // never overflows
  return x * (y < broadcast(0.f) ? e : broadcast(1.f)) / (1.f + e);
}

inline Floats silu(Floats x) { return gated(x, x); }

// x times the normal distribution's share below x, by the complement of the error function of |x| / sqrt(2) within 2e-7
// (Abramowitz and Stegun, 7.1.26).
inline Floats gelu(Floats x) {
  const Floats z = negative(x) * 0.70710678f, t = 1.f / (1.f - z * 0.3275911f);
  Floats p = broadcast(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, broadcast(c));
  const Floats tail = p * t * exp_negative(negative(z * z)) * 0.5f;
  return x * (x < broadcast(0.f) ? tail : 1.f - tail);
}

// The same by tanh(sqrt(2 / pi) * (x + 0.044715 x^3)), as models write it that were trained so.
inline Floats gelu_tanh(Floats x) { return gated(x, x * fma(x * x, broadcast(0.07135481f), broadcast(1.59576912f))); }

inline Floats tanh(Floats x) {
  const Bits sign = (Bits)x & 0x80000000u;
  Floats e = exp_negative(negative(x) * 2.f);
  return (Floats)((Bits)((1.f - e) / (1.f + e)) | sign);
}

}  // namespace
