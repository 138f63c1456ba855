// How codes become vectors: one small reader per code type and engine. A new code type is a new reader.
// A reader with GROUPS also serves formats whose channels share scales by groups of a multiple of 32.
//
// An engine multiplies and adds. It works on chunks of channels: CHUNK channels are VECS vectors of keys, and 4
// accumulators of VL floats of output. A reader loads one chunk of one row, zero beyond D.
//   Float: any format, any instruction set.
//   Int16 (VNNI): integer codes; the other factor is scaled to int16 (relative error 2^-16 of its largest element).
//   Bf16: bfloat16 values or codes exact in bfloat16.
// The last two multiply pairs and serve bfloat16 and float16 compute only.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "args.h"
#include "vec.h"

namespace qkv {
namespace {

struct Float {
  using Vec = VF;
  using Acc = VF;
  static constexpr int CHUNK = 4 * VL, VECS = 4, STEP = 1, BYTES = 4;
  static FORCE Acc dot(Acc c, Vec a, Vec b) { return madd(a, b, c); }
  static FORCE Vec weight(const char* w) { return splat(load<float>(w)); }
  static FORCE VF as_float(Acc a) { return a; }
  static FORCE void sum4(const Acc* a, float* out) {
    for (int i = 0; i < 4; i++) out[i] = hsum(a[i]);
  }
  template <class R>
  static FORCE void values(const char* const* rows, int64_t at, int chunk, int D, Vec* out) {
    R::load(rows[0] + at, chunk, D, out);
  }
  static float pack(const float* x, int n, void* out) {  // out = x / result; returns result
    memcpy(out, x, 4 * n);
    return 1.f;
  }
};

template <class R>
struct FloatReader {  // R::get reads VL elements of R::BYTES bytes
  using Engine = Float;
  static constexpr bool BYTE_LANES = false, GROUPS = false;
  static FORCE void load(const char* row, int chunk, int D, VF* out) {
    for (int i = 0; i < 4; i++) {
      int d = chunk * Float::CHUNK + i * VL, n = D - d;
      if (n >= VL)
        out[i] = R::get(row + int64_t(d) * R::BYTES);
      else if (n <= 0)
        out[i] = VF{};
      else {
        char rest[VL * R::BYTES] = {};
        memcpy(rest, row + int64_t(d) * R::BYTES, n * R::BYTES);
        out[i] = R::get(rest);
      }
    }
  }
};

// A row in 32 bits. Writes up to VL floats beyond D.
template <class R>
INLINE void read_row(const char* row, int D, float* out) {
  for (int d = 0; d < D; d += VL) {
    const int n = D - d;
    char rest[VL * R::BYTES] = {};
    if (n < VL) memcpy(rest, row + d * R::BYTES, n * R::BYTES);
    store(out + d, R::get(n < VL ? rest : row + d * R::BYTES));
  }
}

struct ReadF32 : FloatReader<ReadF32> {
  static constexpr int BYTES = 4;
  static FORCE VF get(const char* p) { return qkv::load<VF>(p); }
};
struct ReadBF16 : FloatReader<ReadBF16> {
  static constexpr int BYTES = 2;
  static FORCE VF get(const char* p) { return (VF)(widen_u16(p) << 16); }
};
struct ReadF16 : FloatReader<ReadF16> {
  static constexpr int BYTES = 2;
  static FORCE VF get(const char* p) { return widen_half(p); }
};
struct ReadI8 : FloatReader<ReadI8> {
  static constexpr int BYTES = 1;
  static FORCE VF get(const char* p) { return widen_int8(p); }
};
struct ReadE4M3 : FloatReader<ReadE4M3> {
  static constexpr int BYTES = 1;
  static FORCE VF get(const char* p) {  // exponent and mantissa moved to float's place; the product fixes the bias
    VI x = widen_u8(p);
    return (VF)((VI)((VF)((x & 127) << 20) * 0x1p120f) | ((x & 128) << 24));
  }
};
struct ReadE5M2 : FloatReader<ReadE5M2> {
  static constexpr int BYTES = 1;
  static FORCE VF get(const char* p) {
    VI x = widen_u8(p);
    return (VF)((VI)((VF)((x & 127) << 21) * 0x1p112f) | ((x & 128) << 24));
  }
};

#if defined(QKV_AVX512)

struct Pairs {
  using Vec = __m512i;
  static constexpr int CHUNK = 64, VECS = 2, STEP = 2, BYTES = 2;
  static FORCE Vec weight(const char* w) { return _mm512_set1_epi32(qkv::load<int32_t>(w)); }
  // Rows t and t + 1, element by element side by side. unpack works within 128-bit lanes, which permutes the channels.
  template <class R>
  static FORCE void values(const char* const* rows, int64_t at, int chunk, int D, Vec* out) {
    Vec a[2], b[2];
    R::load(rows[0] + at, chunk, D, a);
    R::load(rows[1] + at, chunk, D, b);
    for (int u = 0; u < 2; u++) {
      out[2 * u] = _mm512_unpacklo_epi16(a[u], b[u]);
      out[2 * u + 1] = _mm512_unpackhi_epi16(a[u], b[u]);
    }
  }
};

struct Int16 : Pairs {
  using Acc = VI;
  static FORCE Acc dot(Acc c, Vec a, Vec b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));  // the intrinsic makes GCC 12 copy accumulators around
    return c;
  }
  static FORCE VF as_float(Acc a) { return to_float(a); }
  static FORCE void sum4(const Acc* a, float* out) { qkv::sum4(a, out); }
  static float pack(const float* x, int n, void* out) {  // n a multiple of 16
    VF top = VF{};
    for (int i = 0; i < n; i += VL) top = vmax(top, (VF)_mm512_abs_ps(qkv::load<VF>(x + i)));
    const float largest = hmax(top);
    // a sum of n products with codes of up to 128 must stay below 2^31
    const float range = n <= 512 ? 32767.f : float((1 << 24) / n - 1);
    const float up = largest > 0 ? range / largest : 0.f;
    for (int i = 0; i < n; i += VL)
      store((char*)out + 2 * i, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(qkv::load<VF>(x + i) * up)));
    return largest / range;
  }
};

struct Bf16 : Pairs {
  using Acc = VF;
  static FORCE Acc dot(Acc c, Vec a, Vec b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
  }
  static FORCE VF as_float(Acc a) { return a; }
  static FORCE void sum4(const Acc* a, float* out) { qkv::sum4(a, out); }
  static float pack(const float* x, int n, void* out) {
    for (int i = 0; i < n; i += VL) store((char*)out + 2 * i, (__m256i)_mm512_cvtneps_pbh(qkv::load<VF>(x + i)));
    return 1.f;
  }
};

template <class E>
struct WordReader {  // channels in order
  using Engine = E;
  static constexpr bool BYTE_LANES = false, GROUPS = false;
};

INLINE uint64_t lanes(int n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }  // n >= 1

struct PairI8 : WordReader<Int16> {
  static constexpr int BYTES = 1;
  static FORCE void load(const char* row, int chunk, int D, __m512i* out) {
    const uint64_t m = lanes(D - chunk * 64);
    const char* p = row + chunk * 64;
    out[0] = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((__mmask32)m, p));
    out[1] = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((__mmask32)(m >> 32), p + 32));
  }
};

struct PairBF16 : WordReader<Bf16> {
  static constexpr int BYTES = 2;
  static FORCE void load(const char* row, int chunk, int D, __m512i* out) {
    const uint64_t m = lanes(D - chunk * 64);
    const char* p = row + chunk * 128;
    out[0] = _mm512_maskz_loadu_epi16((__mmask32)m, p);
    out[1] = _mm512_maskz_loadu_epi16((__mmask32)(m >> 32), p + 64);
  }
};

// Whether every 32 channels of a packed row are a whole word, or as many whole runs as fit one.
INLINE bool in_words(Code code, int D) { return code == Code::I4 ? D % 64 == 0 : D == 64 || D == 128 || D % 256 == 0; }

// 32 codes from channel d on (a multiple of 32) of one plane of a packed row, in bytes.
template <int WIDTH>
INLINE __m256i plane_codes(const char* plane, int D, int d) {
  const int run = D * WIDTH / 8;
  int i = 0;  // d's run
  for (int k = 1; k < 8 / WIDTH; k++) i += d >= k * run;
  const __m256i shift = _mm256_set1_epi64x(i * WIDTH);
  __m256i x;
  if (run >= 32)
    x = _mm256_srlv_epi64(load<__m256i>(plane + d - i * run), shift);
  else if (run == 16)
    x = _mm256_srlv_epi64(_mm256_broadcastsi128_si256(load<__m128i>(plane)), shift + _mm256_setr_epi64x(0, 0, WIDTH, WIDTH));
  else
    x = _mm256_srlv_epi64(_mm256_set1_epi64x(load<int64_t>(plane)), shift + _mm256_setr_epi64x(0, WIDTH, 2 * WIDTH, 3 * WIDTH));
  return _mm256_and_si256(x, _mm256_set1_epi8((1 << WIDTH) - 1));
}

// 32 signed codes from channel d on.
template <int BITS>
INLINE __m256i packed_codes(const char* row, int D, int d) {
  __m256i x = plane_codes<BITS == 3 ? 2 : BITS>(row, D, d);
  if constexpr (BITS == 3) x = _mm256_or_si256(x, _mm256_slli_epi16(plane_codes<1>(row + D / 4, D, d), 2));
  return _mm256_sub_epi8(x, _mm256_set1_epi8(1 << (BITS - 1)));
}

template <int BITS>
struct PairPacked : WordReader<Int16> {  // where in_words()
  static constexpr bool GROUPS = true;
  static FORCE void load(const char* row, int chunk, int D, __m512i* out) {
    for (int u = 0; u < 2; u++) out[u] = _mm512_cvtepi8_epi16(packed_codes<BITS>(row, D, chunk * 64 + u * 32));
  }
};

// 8-bit floats are looked up, exactly, in two tables of 128 bytes; unpacking the bytes permutes channels within 128-bit lanes.
struct Tables {
  alignas(64) uint8_t low[128], high[128];
  Tables(int mantissa, int bias) {
    for (int i = 0; i < 128; i++) {
      const int exponent = i >> mantissa, fraction = i & ((1 << mantissa) - 1);
      const float value = exponent ? ldexpf(float(fraction + (1 << mantissa)), exponent - bias - mantissa)
                                   : ldexpf(float(fraction), 1 - bias - mantissa);
      low[i] = float_to_bits(value) >> 16;
      high[i] = float_to_bits(value) >> 24;
    }
  }
};

template <int MANTISSA, int BIAS>
struct PairFP8 {
  using Engine = Bf16;
  static constexpr bool BYTE_LANES = true, GROUPS = false;
  static constexpr int BYTES = 1;
  static FORCE void load(const char* row, int chunk, int D, __m512i* out) {
    const __m512i x = _mm512_maskz_loadu_epi8(lanes(D - chunk * 64), row + chunk * 64);
    const __m512i low = _mm512_permutex2var_epi8(qkv::load<__m512i>(tables.low), x, qkv::load<__m512i>(tables.low + 64));
    __m512i high = _mm512_permutex2var_epi8(qkv::load<__m512i>(tables.high), x, qkv::load<__m512i>(tables.high + 64));
    high = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8(-128), 0xf8);  // high | (x & sign)
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
  }
  static const Tables tables;
};
template <int MANTISSA, int BIAS>
const Tables PairFP8<MANTISSA, BIAS>::tables(MANTISSA, BIAS);

using PairE4M3 = PairFP8<3, 7>;
using PairE5M2 = PairFP8<2, 15>;

#endif

}  // namespace
}  // namespace qkv
