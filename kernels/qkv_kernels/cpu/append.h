// Rows of K or V to codes and scales in their slots: the rules of reference/codec.py, operation by operation, so that the
// bytes are the same. Compiled without contraction of a * b + c, which would round differently.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "args.h"
#include "pages.h"
#include "rows.h"
#include "vec.h"

namespace qkv {
namespace {

constexpr float MIN_SCALE = 0x1p-24f;  // smallest positive float16

INLINE VF clampv(VF x, float low, float high) { return vmin(vmax(x, splat(low)), splat(high)); }

// The largest (sign +1) or smallest (sign -1) of n floats, or of their magnitudes.
INLINE float extreme(const float* x, int n, float sign, bool magnitude) {
  float best = -INFINITY;
  int i = 0;
  if (n >= VL) {
    VF top = splat(-INFINITY);
    for (; i + VL <= n; i += VL) {
      VF v = load<VF>(x + i);
      v = magnitude ? (VF)((VI)v & 0x7fffffff) : v * sign;
      top = vmax(top, v);
    }
    best = hmax(top);
  }
  for (; i < n; i++) {
    const float v = magnitude ? fabsf(x[i]) : x[i] * sign;
    best = v > best ? v : best;
  }
  return best * sign;
}

INLINE float stored(float x, bool half) { return half ? from_half(to_half(x)) : x; }

INLINE float stored_scale(float s, bool half) {
  const float largest = half ? 65504.f : 3.4028234664e38f;
  s = s < MIN_SCALE ? MIN_SCALE : s > largest ? largest : s;
  return stored(s, half);
}

// Scale and zero, as stored, of values from low to high.
INLINE void scale_of(const Plane& p, float low, float high, float qmin, float qmax, float* scale, float* zero) {
  *zero = 0.f;
  if (p.zero == NO_ZERO) {
    *scale = stored_scale((-low > high ? -low : high) / qmax, p.half_scale);
    return;
  }
  if (p.zero == CODE_ZERO) {
    low = low < 0.f ? low : 0.f, high = high > 0.f ? high : 0.f;
    *scale = stored_scale((high - low) / (qmax - qmin), p.half_scale);
    float z = nearbyintf(qmin - low / *scale);
    z = z < qmin ? qmin : z > qmax ? qmax : z;
    *zero = stored(z, p.half_scale);
    return;
  }
  const float largest = p.half_scale ? 65504.f : 3.4028234664e38f;
  float z = low - (high - low) / (qmax - qmin) * qmin;
  *zero = z = stored(z < -largest ? -largest : z > largest ? largest : z, p.half_scale);
  const float up = (high - z) / qmax, down = (low - z) / qmin;
  *scale = stored_scale(up > down ? up : down, p.half_scale);
}

// Dynamic scale and zero of a row or group, as stored.
INLINE void choose(const Plane& p, const float* x, int n, float qmin, float qmax, float* scale, float* zero) {
  const float low = p.zero == NO_ZERO ? 0.f : extreme(x, n, -1.f, false);
  scale_of(p, low, extreme(x, n, 1.f, p.zero == NO_ZERO), qmin, qmax, scale, zero);
}

// Float to 8-bit float, nearest even, of |x| <= largest. Float's own rounding does it: in the low bits of a sum for
// subnormals, by carry for the others.
template <int MANTISSA, int BIAS>
INLINE VI to_fp8(VF x) {
  constexpr int DROP = 23 - MANTISSA;
  const VI bits = (VI)x, sign = (VI)((VU)bits >> 24) & 128, u = bits & 0x7fffffff;
  const VF anchor =
      splat(bits_to_float(uint32_t(127 + 1 - BIAS + DROP) << 23));  // one unit in its last place is the smallest subnormal
  const VI small = (VI)((VF)u + anchor) - (VI)anchor;
  const VI normal = (u - ((127 - BIAS) << 23) + ((1 << (DROP - 1)) - 1) + ((u >> DROP) & 1)) >> DROP;
  const VI is_small = u < ((128 - BIAS) << 23);
  return sign | ((is_small & small) | (~is_small & normal));
}

// Bits [shift, shift + width) of codes q [D] -> one plane of reference/packing.py.
INLINE void pack_plane(const int32_t* q, int D, int shift, int width, char* out) {
  const int run = D * width / 8;
  for (int j = 0; j < run; j++) {
    int byte = 0;
    for (int i = 0; i < 8 / width; i++) byte |= (q[j + i * run] >> shift & ((1 << width) - 1)) << (i * width);
    out[j] = char(byte);
  }
}

// One row x [D] (padded to a multiple of VL) -> codes.
INLINE void write_codes(const Plane& p, const float* x, char* out) {
  const int D = p.D;
  switch (p.code) {
    case Code::F32: memcpy(out, x, 4 * D); return;
    case Code::BF16:
      for (int d = 0; d < D; d++) ((uint16_t*)out)[d] = to_bf16(x[d]);
      return;
    case Code::F16:
      for (int d = 0; d < D; d++) ((uint16_t*)out)[d] = to_half(x[d]);
      return;
    default: break;
  }
  int32_t q[(D + VL) / VL * VL];
  const float magic = 12582912.f;  // adding it rounds to an integer, half to even
  for (int d = 0; d < D; d += VL) {
    const VF v = load<VF>(x + d);
    VI i;
    if (p.code == Code::E4M3)
      i = to_fp8<3, 7>(clampv(v, -448.f, 448.f));
    else if (p.code == Code::E5M2)
      i = to_fp8<2, 15>(clampv(v, -57344.f, 57344.f));
    else {
      const float high = float((1 << (p.bits() - 1)) - 1), low = p.zero == NO_ZERO ? -high : -high - 1;
      i = (VI)(clampv(v, low, high) + magic) - (VI)splat(magic);
    }
    store(q + d, i);
  }
  if (p.code >= Code::I4) {
    const int bits = p.bits();
    for (int d = 0; d < D; d++) q[d] += 1 << (bits - 1);
    pack_plane(q, D, 0, bits == 3 ? 2 : bits, out);
    if (bits == 3) pack_plane(q, D, 2, 1, out + D / 4);
  } else
    for (int d = 0; d < D; d++) out[d] = char(q[d]);
}

INLINE void write_scale(const Plane& p, char* plane, int64_t at, int i, float x) {
  const uint16_t half = to_half(x);
  memcpy(plane + at + i * (p.half_scale ? 2 : 4), p.half_scale ? (void*)&half : (void*)&x, p.half_scale ? 2 : 4);
}

INLINE void code_range(const Plane& p, float* qmin, float* qmax) {
  *qmax = p.code == Code::E4M3 ? 448.f : p.code == Code::E5M2 ? 57344.f : float((1 << (p.bits() - 1)) - 1);
  *qmin = p.zero == NO_ZERO ? -*qmax : -*qmax - 1;
}

INLINE void rotate(const Plane& p, float* x) {
  if (!p.rotate) return;
  for (int d = 0; d < p.D; d++) x[d] = x[d] < -0x1p100f ? -0x1p100f : x[d] > 0x1p100f ? 0x1p100f : x[d];
  hadamard(x, p.D);
}

// Rotated row x [D] of kv head h -> its place on a page. x is overwritten. s, z: scales and zeros per channel, or null.
INLINE void encode(const Plane& p, float* x, int h, int64_t block, int offset, const float* s, const float* z) {
  const int D = p.D;
  if (p.scale == TOKEN || p.scale == GROUP) {
    float qmin, qmax;
    code_range(p, &qmin, &qmax);
    const int n = p.scale == GROUP ? p.group : D;
    const int64_t at = block * p.s_block + h * p.s_head + offset * p.s_token;
    for (int g = 0; g < D / n; g++) {
      float scale, zero;
      choose(p, x + g * n, n, qmin, qmax, &scale, &zero);
      for (int d = g * n; d < (g + 1) * n; d++) {
        if (p.zero == FLOAT_ZERO) x[d] -= zero;
        x[d] /= scale;
        if (p.zero == CODE_ZERO) x[d] += zero;
      }
      write_scale(p, p.scales, at, g, scale);
      if (p.zero != NO_ZERO) write_scale(p, p.zeros, at, g, zero);
    }
  } else if (p.scale != UNSCALED) {
    const float head = p.head_scale ? p.head_scale[h] : 1.f;
    for (int d = 0; d < D; d++) {
      if (z && p.zero == FLOAT_ZERO) x[d] -= z[d];
      x[d] /= s ? s[d] : head;
      if (z && p.zero == CODE_ZERO) x[d] += z[d];
    }
  }
  write_codes(p, x, p.codes + block * p.block + h * p.head + offset * p.token);
}

INLINE const float* of_head(const Plane& p, const float* statics, int h) {
  return statics ? statics + int64_t(h) * p.D : nullptr;
}

// K and V of rows [row0, row1), of formats that encode rows. Padding rows (slot below B: none, or the null block) write nothing.
void append(const Call& c, int row0, int row1) {
  float x[(c.K.D > c.V.D ? c.K.D : c.V.D) + VL];
  const auto put = [&](const Plane& p, const Rows& rows, int row, int h) {
    if (p.tail.data) return;
    load_row(rows, c.dtype, row, h, p.D, x);
    rotate(p, x);
    encode(p, x, h, c.slots[row] / c.B, int(c.slots[row] % c.B), of_head(p, p.channel_scale, h), of_head(p, p.static_zero, h));
  };
  for (int row = row0; row < row1; row++)
    for (int h = 0; h < c.H && c.slots[row] >= c.B; h++) put(c.K, c.k, row, h), put(c.V, c.v, row, h);
}

// K and V of one block of a request, of formats that encode whole blocks, whose last token is in this call.
void complete(const Call& c, int request, int block, int h) {
  static thread_local Arena arena;
  const auto put = [&](const Plane& p, const Rows& rows) {
    if (!p.tail.data) return;
    const int D = p.D, stride = (D + VL) / VL * VL;
    const int64_t page = c.table[request * c.table_stride + block], at = page * p.s_block + h * p.s_head;
    arena.reset();
    float* x = arena.take<float>(c.B * stride);
    for (int i = 0; i < c.B; i++) {
      load_row(raw_row(c, p, rows, request, block * c.B + i, h), c.dtype, D, x + i * stride);
      rotate(p, x + i * stride);
    }
    const float *s = of_head(p, p.channel_scale, h), *z = of_head(p, p.static_zero, h);
    if (p.scale == BLOCK_CHANNEL) {
      float *low = arena.take<float>(stride), *high = arena.take<float>(stride), qmin, qmax;
      code_range(p, &qmin, &qmax);
      memcpy(low, x, D * 4), memcpy(high, x, D * 4);
      for (int i = 1; i < c.B; i++)
        for (int d = 0; d < D; d++) {
          const float v = x[i * stride + d];
          low[d] = v < low[d] ? v : low[d], high[d] = v > high[d] ? v : high[d];
        }
      for (int d = 0; d < D; d++) {
        float scale, zero;
        scale_of(p, low[d], high[d], qmin, qmax, &scale, &zero);
        write_scale(p, p.scales, at, d, low[d] = scale);
        if (p.zero != NO_ZERO) write_scale(p, p.zeros, at, d, high[d] = zero);
      }
      s = low, z = p.zero == NO_ZERO ? nullptr : high;
    }
    for (int i = 0; i < c.B; i++) encode(p, x + i * stride, h, page, i, s, z);
  };
  put(c.K, c.k), put(c.V, c.v);
}

}  // namespace
}  // namespace qkv
