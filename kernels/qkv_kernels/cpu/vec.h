// Vectors of VL floats and what the kernels do with them, for the instruction set this file is compiled for.
// Everything has internal linkage: the same names are compiled once per instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define QKV_ISA avx512
#define VL 16
#elif defined(__AVX2__)
#define QKV_ISA avx2
#define VL 8
#else
#define QKV_ISA portable
#define VL 4  // what every machine passes in registers
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
INLINE void store(void* p, V v) { memcpy(p, &v, sizeof v); }

INLINE VF splat(float x) { return x - VF{}; }
INLINE VF to_float(VI x) { return __builtin_convertvector(x, VF); }

INLINE VI lane_numbers() {
  VI lane;
  for (int i = 0; i < VL; i++) lane[i] = i;
  return lane;
}

// Lane i of the result is lane which[i] of a and b, one after the other.
INLINE VF pick(VF a, VF b, VI which) {
#if defined(__clang__)
  VF out;
  for (int i = 0; i < VL; i++) out[i] = which[i] < VL ? a[which[i]] : b[which[i] - VL];
  return out;
#else
  return __builtin_shuffle(a, b, which);
#endif
}

// Lane i of the result is lane i ^ S of v.
template <int S>
INLINE VF exchange(VF v) {
  VF out;
#if defined(__clang__)
  for (int i = 0; i < VL; i++) out[i] = v[i ^ S];
#else
  out = __builtin_shuffle(v, lane_numbers() ^ S);
#endif
  return out;
}

#if defined(__AVX512F__)
INLINE VF madd(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
INLINE VF vmax(VF a, VF b) { return _mm512_max_ps(a, b); }
INLINE VF vmin(VF a, VF b) { return _mm512_min_ps(a, b); }
INLINE float hsum(VF v) { return _mm512_reduce_add_ps(v); }
INLINE float hmax(VF v) { return _mm512_reduce_max_ps(v); }
INLINE VF widen_half(const void* p) { return _mm512_cvtph_ps(load<__m256i>(p)); }
INLINE VF widen_int8(const void* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p))); }
INLINE VI widen_u8(const void* p) { return (VI)_mm512_cvtepu8_epi32(load<__m128i>(p)); }
INLINE VI widen_u16(const void* p) { return (VI)_mm512_cvtepu16_epi32(load<__m256i>(p)); }
INLINE VI widen_u8(const void* p, int n) { return (VI)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8((1 << n) - 1, p)); }
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
#if defined(__AVX2__)
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

#if !defined(__AVX512F__)
INLINE VI widen_u8(const void* p, int n) {  // n < VL bytes, then zeros
  char bytes[VL] = {};
  memcpy(bytes, p, n);
  return widen_u8(bytes);
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
