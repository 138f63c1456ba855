// A tile of keys as it lies in pages: pointers to its rows, its scales, and its rows dequantized where that is needed.
#pragma once
#include <cstdint>
#include <cstring>

#include "args.h"
#include "readers.h"
#include "vec.h"

namespace qkv {
namespace {

// The raw row at a position: a sink token has it in the sinks, a token of this call in the call, a token before that in the tail.
INLINE const char* raw_row(const Call& c, const Plane& p, const Rows& rows, int request, int position, int h) {
  if (position < p.sink.rows) return p.sink.at(c.sink_slots[request], h, position);
  const int first = c.starts[request], age = position - int(c.positions[first]);
  return age < 0 ? p.tail.at(c.tail_slots[request], h, position % p.tail.rows)
                 : rows.data + (first + age) * rows.row + h * rows.head;
}

// The call as a segment of raw rows of K or V is computed: that side has no scales, no rotation and no pages.
INLINE Call as_seen(const Call& call, bool k_raw, bool v_raw) {
  Call c = call;
  const auto see = [&](Plane& p) {
    p.code = c.dtype, p.scale = UNSCALED, p.zero = NO_ZERO, p.rotate = false, p.raw = true;
    p.codes = p.scales = p.zeros = nullptr, p.head_scale = p.channel_scale = p.static_zero = nullptr;
    p.block = p.head = p.token = 0;
  };
  if (k_raw) see(c.K);
  if (v_raw) see(c.V);
  return c;
}

struct Run {  // keys of the tile that are neighbours on one page
  int64_t block;
  int offset, begin, end;  // offset of key `begin` (of the tile) in its page
};

struct Tile {
  const char *k[TILE], *v[TILE];  // rows of kv head 0; a key outside [t0, t1) borrows the row of key t0
  Run runs[TILE];
  int count, t0, t1;  // keys [t0, t1) of the tile are seen

  // Keys [first, last) of a request, within the tile that starts at key `start`. Raw rows are those of kv head h.
  void find(const Call& c, int request, int start, int first, int last, int h) {
    const int32_t* table = c.table + request * c.table_stride;
    t0 = (first > start ? first : start) - start, t1 = (last < start + TILE ? last : start + TILE) - start;
    count = 0;
    for (int t = t0; t < t1;) {
      const int key = start + t, offset = key % c.B, n = c.B - offset < t1 - t ? c.B - offset : t1 - t;
      const int64_t block = table[key / c.B];
      const char *kp = c.K.codes + block * c.K.block + offset * c.K.token,
                 *vp = c.V.codes + block * c.V.block + offset * c.V.token;
      for (int i = 0; i < n; i++) k[t + i] = kp + i * c.K.token, v[t + i] = vp + i * c.V.token;
      runs[count++] = {block, offset, t, t + n};
      t += n;
    }
    for (int t = t0; c.K.raw && t < t1; t++) k[t] = raw_row(c, c.K, c.k, request, start + t, h);
    for (int t = t0; c.V.raw && t < t1; t++) v[t] = raw_row(c, c.V, c.v, request, start + t, h);
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

// One plane of a packed row (its layout is reference/packing.py's), widened: out[d] = (or +=, with ADD) code * weight - offset.
// Writes up to VL floats beyond D.
template <int WIDTH, bool ADD>
INLINE void unpack_plane(const char* plane, int D, float weight, float offset, float* out) {
  const int run = D * WIDTH / 8;
#pragma GCC unroll 8
  for (int i = 0; i < 8 / WIDTH; i++)
    for (int j = 0; j < run; j += VL) {
      const VI bytes = j + VL <= run ? widen_u8(plane + j) : widen_u8(plane + j, run - j);
      float* o = out + i * run + j;
      const VF x = to_float((bytes >> (i * WIDTH)) & ((1 << WIDTH) - 1)) * weight;
      store(o, ADD ? load<VF>(o) + x : x - offset);
    }
}

#if defined(QKV_AVX512)
template <int BITS>
INLINE void unpack_words(const char* row, int D, float* out) {  // where in_words()
  for (int d = 0; d < D; d += 32) {
    const __m256i x = packed_codes<BITS>(row, D, d);
    store(out + d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x))));
    store(out + d + 16, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1))));
  }
}
#endif

// A row as numbers, without scales. Writes up to VL floats beyond D.
INLINE void unpack(const Plane& p, const char* row, float* out) {
  const int D = p.D;
#if defined(QKV_AVX512)
  if (p.code >= Code::I4 && in_words(p.code, D))
    return p.code == Code::I4   ? unpack_words<4>(row, D, out)
           : p.code == Code::I3 ? unpack_words<3>(row, D, out)
                                : unpack_words<2>(row, D, out);
#endif
  switch (p.code) {
    case Code::I4: return unpack_plane<4, false>(row, D, 1.f, 8.f, out);
    case Code::I2: return unpack_plane<2, false>(row, D, 1.f, 2.f, out);
    case Code::I3: return unpack_plane<2, false>(row, D, 1.f, 4.f, out), unpack_plane<1, true>(row + D / 4, D, 4.f, 0.f, out);
    case Code::E4M3: return read_row<ReadE4M3>(row, D, out);
    case Code::E5M2: return read_row<ReadE5M2>(row, D, out);
    default: return read_row<ReadI8>(row, D, out);  // what has 16 bits or more is always read by its reader
  }
}

// n scales or zeros that are neighbours. Writes up to VL floats beyond n.
INLINE void scales_at(const Plane& p, const char* s, int n, float* out) {
  int i = 0;
  for (; i + VL <= n; i += VL) store(out + i, p.half_scale ? widen_half(s + 2 * i) : load<VF>(s + 4 * i));
  for (; i < n; i++) out[i] = scale_at(p, s + i * (p.half_scale ? 2 : 4));
}

// x[d] = x[d] * s + z for n floats.
INLINE void scale_row(float* x, int n, float s, float z) {
  int d = 0;
  for (; d + VL <= n; d += VL) store(x + d, madd(load<VF>(x + d), splat(s), splat(z)));
  for (; d < n; d++) x[d] = x[d] * s + z;
}

#if defined(QKV_AVX512)
// n floats to bfloat16 in the same place; n is rounded up to whole vectors.
INLINE void narrow(float* x, int n) {
  for (int d = 0; d < n; d += VL) store((char*)x + 2 * d, (__m256i)_mm512_cvtneps_pbh(load<VF>(x + d)));
}
#endif

// Rows of kv head h with the scales of their groups or block applied (token scales are not), as with_rows() reads them: rows of
// `stride` floats in `out` [TILE * stride + VL], and pointers to them [TILE].
INLINE void dequantize(const Plane& p, Code dtype, const char* const* rows, const Tile& tile, int h, float* out, int stride,
                       const char** to) {
  const int n = p.scale == GROUP ? p.D / p.group : p.scale == BLOCK_CHANNEL ? p.D : 0;  // scales of a row, or of a block
  float s[n + VL], z[n + VL];
  for (int i = 0; i < n; i++) z[i] = 0.f;
  for (int r = 0; r < tile.count; r++) {
    const Run& run = tile.runs[r];
    for (int t = run.begin; t < run.end; t++) {
      if (n && (t == run.begin || p.scale == GROUP)) {
        const int64_t at =
            run.block * p.s_block + h * p.s_head + (p.scale == GROUP ? (run.offset + t - run.begin) * p.s_token : 0);
        scales_at(p, p.scales + at, n, s);
        if (p.zero != NO_ZERO) scales_at(p, p.zeros + at, n, z);
        for (int i = 0; p.zero == CODE_ZERO && i < n; i++) z[i] *= -s[i];
      }
      float* x = out + t * stride;
      unpack(p, rows[t] + h * p.head, x);
      if (p.scale == GROUP)
        for (int g = 0; g < n; g++) scale_row(x + g * p.group, p.group, s[g], z[g]);
      else
        for (int d = 0; d < n; d += VL) store(x + d, madd(load<VF>(x + d), load<VF>(s + d), load<VF>(z + d)));
#if defined(QKV_AVX512)
      if (dtype == Code::BF16) narrow(x, p.D);
#endif
      to[t] = (const char*)x;
    }
  }
  for (int t = 0; t < TILE; t++)
    if (t < tile.t0 || t >= tile.t1) to[t] = to[tile.t0];
}

// Group scales (or, from `zeros`, zeros) of kv head h by group: out [groups][TILE], zero outside [t0, t1). Groups a power of two,
// at most MAX_GROUPS; the scales of a page's rows are neighbours.
constexpr int MAX_GROUPS = 8;
INLINE void group_scales(const Plane& p, const char* plane, const Tile& tile, int h, float* out) {
  const int n = p.D / p.group;
  float x[MAX_GROUPS * TILE + VL];
  for (int i = 0; i < n * TILE; i += VL) store(x + i, VF{});
  for (int r = 0; r < tile.count; r++) {
    const Run& run = tile.runs[r];
    scales_at(p, plane + run.block * p.s_block + h * p.s_head + run.offset * p.s_token, (run.end - run.begin) * n,
              x + run.begin * n);
  }
  VF v[MAX_GROUPS], w[MAX_GROUPS];
  for (int t = 0; t < TILE; t += VL) {
    for (int i = 0; i < n; i++) v[i] = load<VF>(x + t * n + i * VL);
    for (int step = 1; step < n; step *= 2) {  // each pass moves the lowest bit of the index (token, group) to the top
      for (int i = 0; i < n / 2; i++) {
        w[i] = shuffle(v[2 * i], v[2 * i + 1], [](int lane) { return 2 * lane; });
        w[n / 2 + i] = shuffle(v[2 * i], v[2 * i + 1], [](int lane) { return 2 * lane + 1; });
      }
      for (int i = 0; i < n; i++) v[i] = w[i];
    }
    for (int i = 0; i < n; i++) store(out + i * TILE + t, v[i]);
  }
}

}  // namespace
}  // namespace qkv
