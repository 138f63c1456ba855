// Vectors of VL floats and what the kernels do with them, for the instruction set this file is compiled for.
// Everything has internal linkage: the same names are compiled once per instruction set.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "isa.h"

#if defined(QKV_AVX512) || defined(QKV_AVX2)
#include <immintrin.h>
#endif

#define FORCE inline __attribute__((always_inline))
#define INLINE static FORCE

namespace qkv {
namespace {

typedef float VF __attribute__((vector_size(4 * VL), may_alias));
typedef int32_t VI __attribute__((vector_size(4 * VL), may_alias));
typedef uint32_t VU __attribute__((vector_size(4 * VL), may_alias));
typedef int8_t V8 __attribute__((vector_size(VL)));
typedef uint16_t V16 __attribute__((vector_size(2 * VL)));

template <class V>
INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

INLINE VF splat(float x) { return x - VF{}; }
INLINE VF to_float(VI x) { return __builtin_convertvector(x, VF); }

INLINE VI lane_numbers() {
  VI lane;
  for (int i = 0; i < VL; i++) lane[i] = i;
  return lane;
}

template <class V, class At, size_t... I>
INLINE V shuffle(V a, V b, At, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, At{}(int(I))...);
}
// Lane i of the result is lane at(i) of a and b, counted as if b followed a; at is a lambda that captures nothing.
template <class V, class At>
INLINE V shuffle(V a, V b, At at) {
  return shuffle(a, b, at, std::make_index_sequence<VL>());
}

// VL vectors of VL lanes, transposed in place. Each step exchanges the off-diagonal quarters of every square of 2 N x 2 N.
template <int N = VL / 2>
INLINE void transpose(VU (&square)[VL]) {
  for (int i = 0; i < VL; i++)
    if (!(i & N)) {
      VU &a = square[i], &b = square[i + N];
      const VU first = shuffle(a, b, [](int lane) { return lane & N ? VL + lane - N : lane; });
      b = shuffle(a, b, [](int lane) { return lane & N ? VL + lane : lane + N; });
      a = first;
    }
  if constexpr (N > 1) transpose<N / 2>(square);
}

#if defined(QKV_AVX512)
INLINE VF madd(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
INLINE VF vmax(VF a, VF b) { return _mm512_max_ps(a, b); }
INLINE VF vmin(VF a, VF b) { return _mm512_min_ps(a, b); }
INLINE float hsum(VF v) { return _mm512_reduce_add_ps(v); }
INLINE float hmax(VF v) { return _mm512_reduce_max_ps(v); }
INLINE VF widen_half(const void* p) { return _mm512_cvtph_ps(load<__m256i>(p)); }
INLINE VF widen_int8(const void* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p))); }
INLINE VI widen_u8(const void* p) { return (VI)_mm512_cvtepu8_epi32(load<__m128i>(p)); }
INLINE VI widen_u16(const void* p) { return (VI)_mm512_cvtepu16_epi32(load<__m256i>(p)); }
#else
INLINE VF vmax(VF a, VF b) { return a > b ? a : b; }
INLINE VF vmin(VF a, VF b) { return a < b ? a : b; }
INLINE float hsum(VF v) {
  float s = 0;
  for (int n = VL / 2; n; n /= 2)
    for (int i = 0; i < n; i++) v[i] += v[i + n];
  s = v[0];
  return s;
}
INLINE float hmax(VF v) {
  float m = v[0];
  for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
  return m;
}
#if defined(QKV_AVX2)
INLINE VF madd(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
INLINE VF widen_half(const void* p) { return _mm256_cvtph_ps(load<__m128i>(p)); }
INLINE VI widen_u8(const void* p) { return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE VI widen_u16(const void* p) { return (VI)_mm256_cvtepu16_epi32(load<__m128i>(p)); }
INLINE VF widen_int8(const void* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
#else
INLINE VF madd(VF a, VF b, VF c) { return a * b + c; }
INLINE VI widen_u8(const void* p) { return __builtin_convertvector(load<V8>(p), VI) & 255; }
INLINE VI widen_u16(const void* p) { return __builtin_convertvector(load<V16>(p), VI); }
INLINE VF widen_int8(const void* p) { return __builtin_convertvector(load<V8>(p), VF); }
INLINE VF half_bits(VI h) {  // float16 in the low 16 bits; the product rebuilds subnormals
  VF v = (VF)((h & 0x7fff) << 13) * 0x1p112f;
  VI special = (h & 0x7c00) == 0x7c00;
  return (VF)((VI)v | (special & 0x7f800000) | ((h & 0x8000) << 16));
}
INLINE VF widen_half(const void* p) { return half_bits(widen_u16(p)); }
#endif
#endif

// n < VL bytes, then zeros
#if defined(QKV_AVX512)
INLINE VI widen_u8(const void* p, int n) { return (VI)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8((1 << n) - 1, p)); }
#else
INLINE VI widen_u8(const void* p, int n) {
  char bytes[VL] = {};
  memcpy(bytes, p, n);
  return widen_u8(bytes);
}
#endif

// out[i] = sum of the lanes of a[i], for four vectors.
#if defined(QKV_AVX512)
template <class V>  // VF or VI; transposed while adding: 13 instructions for floats
INLINE void sum4(const V* a, float* out) {
  const auto low = [](int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * VL; };  // of each 128 bits, the first two lanes of both
  const auto high = [](int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * VL + 2; };
  const auto low_pair = [](int i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * VL; };
  const auto high_pair = [](int i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * VL + 2; };
  const V ab = shuffle(a[0], a[1], low) + shuffle(a[0], a[1], high), cd = shuffle(a[2], a[3], low) + shuffle(a[2], a[3], high);
  const V all = shuffle(ab, cd, low_pair) + shuffle(ab, cd, high_pair);
  const auto half =
      __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto sums = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
  typedef float Four __attribute__((vector_size(16)));
  store(out, __builtin_convertvector(sums, Four));
}
#else
INLINE void sum4(const VF* a, float* out) {
  for (int i = 0; i < 4; i++) out[i] = hsum(a[i]);
}
#endif

// 2^x for x <= 127; below -126 it returns 2^-126. Relative error 2e-7.
INLINE VF exp2v(VF x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  x = vmax(x, splat(-126.f));
  VF shifted = x + magic;
  VF f = x - (shifted - magic);
  VF p = splat(1.5403530e-4f);
  p = madd(p, f, splat(1.3333558e-3f));
  p = madd(p, f, splat(9.6181291e-3f));
  p = madd(p, f, splat(5.5504109e-2f));
  p = madd(p, f, splat(2.4022651e-1f));
  p = madd(p, f, splat(6.9314718e-1f));
  p = madd(p, f, splat(1.f));
  return (VF)((VI)p + ((VI)shifted << 23));
}

INLINE VF tanhv(VF x) {
  x = vmin(vmax(x, splat(-15.f)), splat(15.f));
  return 1.f - 2.f / (exp2v(x * 2.8853900818f) + 1.f);  // 2 log2 e
}

INLINE float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

// float32 -> float16, round to nearest even, overflow to infinity.
INLINE uint16_t to_half(float x) {
  uint32_t u = float_to_bits(x), sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u < 0x38800000) return sign | (float_to_bits(bits_to_float(u) + 0.5f) - 0x3f000000);  // subnormal: the sum rounds
  if (u >= 0x477ff000) return sign | 0x7c00;
  return sign | (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
}
INLINE float from_half(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16;
  float v = bits_to_float(uint32_t(h & 0x7fff) << 13) * 0x1p112f;
  return bits_to_float((h & 0x7c00) == 0x7c00 ? sign | 0x7f800000 | uint32_t(h & 0x3ff) << 13 : sign | float_to_bits(v));
}
INLINE uint16_t to_bf16(float x) {
  uint32_t u = float_to_bits(x);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

}  // namespace
}  // namespace qkv
