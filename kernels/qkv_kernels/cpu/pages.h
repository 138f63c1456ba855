// A tile of keys as it lies in pages: pointers to its rows, its scales, and its rows dequantized where that is needed.
#pragma once
#include <vector>

#include "tiles.h"

namespace qkv {
namespace {

struct Run {  // keys of the tile that are neighbours on one page
  int64_t block;
  int offset, begin, end;  // offset of key `begin` (of the tile) in its page
};

struct Tile {
  const char *k[TILE], *v[TILE];  // rows of kv head 0; keys that nobody may see get the row of one that somebody may
  Run runs[TILE];
  int count, t0, t1;  // keys [t0, t1) of the tile are seen

  // Keys [first, last) of a request, within the tile that starts at key `start`.
  void find(const Call& c, int request, int start, int first, int last) {
    const int32_t* table = c.table + request * c.table_stride;
    t0 = (first > start ? first : start) - start, t1 = (last < start + TILE ? last : start + TILE) - start;
    count = 0;
    for (int t = t0; t < t1;) {
      const int key = start + t, offset = key % c.B, n = c.B - offset < t1 - t ? c.B - offset : t1 - t;
      const int64_t block = table[key / c.B];
      const char *kp = c.K.codes + block * c.K.block + offset * c.K.token, *vp = c.V.codes + block * c.V.block + offset * c.V.token;
      for (int i = 0; i < n; i++) k[t + i] = kp + i * c.K.token, v[t + i] = vp + i * c.V.token;
      runs[count++] = {block, offset, t, t + n};
      t += n;
    }
    for (int t = 0; t < t0; t++) k[t] = k[t0], v[t] = v[t0];
    for (int t = t1; t < TILE; t++) k[t] = k[t0], v[t] = v[t0];
  }
};

INLINE float scale_at(const Plane& p, const char* s) { return p.half_scale ? from_half(load<uint16_t>(s)) : load<float>(s); }

// Token scales (and, from `zeros`, token zeros) of kv head h: out [TILE], zero outside [t0, t1).
INLINE void token_scales(const Plane& p, const char* plane, const Tile& tile, int h, float* out) {
  for (int i = 0; i < TILE; i += VL) store(out + i, VF{});
  for (int r = 0; r < tile.count; r++) {
    const Run& run = tile.runs[r];
    const char* s = plane + run.block * p.s_block + h * p.s_head + run.offset * p.s_token;
    int t = run.begin;
    if (p.half_scale && p.s_token == 2)
      for (; t + VL <= run.end; t += VL, s += 2 * VL) store(out + t, widen_half(s));
    for (; t < run.end; t++, s += p.s_token) out[t] = scale_at(p, s);
  }
}

// The token scales of the tile's pages into cache, for kv heads [h0, h1).
INLINE void prefetch_scales(const Plane& p, const Tile& tile, int h0, int h1) {
  for (int r = 0; p.scales && r < tile.count; r++) {
    const int64_t at = tile.runs[r].block * p.s_block + h0 * p.s_head + tile.runs[r].offset * p.s_token;
    for (int64_t i = 0; i < (h1 - h0) * p.s_head; i += 64) {
      __builtin_prefetch(p.scales + at + i, 0, 3);
      if (p.zeros) __builtin_prefetch(p.zeros + at + i, 0, 3);
    }
  }
}

// Channel d of a packed row as a signed code; the layout is reference/packing.py's.
INLINE int plane_bits(const char* plane, int D, int width, int d) {
  const int run = D * width / 8;
  return (uint8_t)plane[d % run] >> (d / run * width) & ((1 << width) - 1);
}
INLINE float code_at(const Plane& p, const char* row, int d) {
  switch (p.code) {
    case Code::I4: return float(plane_bits(row, p.D, 4, d) - 8);
    case Code::I3: return float((plane_bits(row, p.D, 2, d) | plane_bits(row + p.D / 4, p.D, 1, d) << 2) - 4);
    case Code::I2: return float(plane_bits(row, p.D, 2, d) - 2);
    default: return float(((const int8_t*)row)[d]);
  }
}

// Rows of kv head h with their group scales applied (token scales are not): out rows of `stride` floats, pointers [TILE].
INLINE void dequantize(const Plane& p, const char* const* rows, const Tile& tile, int h, float* out, int stride, const char** to) {
  const int group = p.scale == GROUP ? p.group : p.D;
  for (int r = 0; r < tile.count; r++) {
    const Run& run = tile.runs[r];
    for (int t = run.begin; t < run.end; t++) {
      const int64_t at = run.block * p.s_block + h * p.s_head + (run.offset + t - run.begin) * p.s_token;
      const char* row = rows[t] + h * p.head;
      float* o = out + t * stride;
      for (int d = 0; d < p.D; d += group) {
        float s = 1.f, z = 0.f;
        if (p.scale == GROUP) {
          const int64_t i = at + d / group * (p.half_scale ? 2 : 4);
          s = scale_at(p, p.scales + i);
          if (p.zero != NO_ZERO) z = scale_at(p, p.zeros + i);
          if (p.zero == CODE_ZERO) z *= -s;
        }
        for (int i = d; i < d + group; i++) o[i] = code_at(p, row, i) * s + z;
      }
      to[t] = (const char*)o;
    }
  }
  for (int t = 0; t < TILE; t++)
    if (t < tile.t0 || t >= tile.t1) to[t] = to[tile.t0];
}

}  // namespace
}  // namespace qkv
