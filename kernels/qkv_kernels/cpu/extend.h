// Many query rows of one request and one kv head: each tile of keys is dequantized and laid out once, then two small matrix
// products serve all rows.
//
// Layout of a packed operand: panels of 4 vectors of columns, one step (1 row for Float, a pair for the others) after
// another. So a step of the product is 4 loads, and one broadcast and 4 multiplications per query.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "args.h"
#include "decode.h"
#include "fold.h"
#include "pages.h"
#include "rows.h"
#include "tiles.h"
#include "vec.h"
#include "weights.h"

namespace qkv {
namespace {

constexpr int MR = REGISTERS == 32 ? 6 : 2;  // queries that a product serves: 4 sums each, 4 vectors of keys or values, one of q
constexpr int PANELS = TILE / (4 * VL);      // of the keys of a tile

// out[i] (4 vectors each) = a[i] . b for N queries: a [N][steps] packed weights, b [steps][4] vectors.
template <class E, int N>
INLINE void product(const char* a, int64_t a_stride, const char* b, int steps, typename E::Acc (*out)[4]) {
  typename E::Acc acc[N][4] = {};
  for (int s = 0; s < steps; s++, a += E::STEP * E::BYTES, b += 4 * sizeof(typename E::Vec)) {
    typename E::Vec v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) v[j] = load<typename E::Vec>(b + j * sizeof v[0]);
#pragma GCC unroll 6
    for (int i = 0; i < N; i++) {
      const typename E::Vec w = E::weight(a + i * a_stride);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) acc[i][j] = E::dot(acc[i][j], w, v[j]);
    }
  }
  for (int i = 0; i < N; i++)
    for (int j = 0; j < 4; j++) out[i][j] = acc[i][j];
}

template <class E, int N = MR>
INLINE void product_n(int n, const char* a, int64_t a_stride, const char* b, int steps, typename E::Acc (*out)[4]) {
  if constexpr (N > 1) {
    if (n < N) return product_n<E, N - 1>(n, a, a_stride, b, steps, out);
  }
  product<E, N>(a, a_stride, b, steps, out);
}

// 32-bit elements in [TILE][n] -> out [PANELS][n][4 * VL].
INLINE void transpose_tile(const uint32_t* in, int n, uint32_t* out) {
  for (int t = 0; t < TILE; t += VL)
    for (int d = 0; d < n; d += VL) {
      uint32_t* o = out + int64_t(t / (4 * VL)) * n * 4 * VL + t % (4 * VL);
      VU square[VL];
      for (int i = 0; i < VL; i++) square[i] = load<VU>(in + (t + i) * n + d);
      transpose(square);
      for (int i = 0; i < VL; i++) store(o + (d + i) * 4 * VL, square[i]);
    }
}

// Keys of a tile -> panels; `rows_out` [TILE][chunks * CHUNK] elements is scratch.
template <class R>
void layout_keys(RowPointers rows, int64_t at, int D, char* rows_out, char* out) {
  using E = typename R::Engine;
  const int count = chunks<E>(D), row = count * E::CHUNK * E::BYTES;
  for (int t = 0; t < TILE; t++)
    for (int c = 0; c < count; c++) {
      typename E::Vec key[E::VECS];
      R::load(rows[t] + at, c, D, key);
      for (int u = 0; u < E::VECS; u++) store(rows_out + t * row + (c * E::VECS + u) * sizeof key[0], key[u]);
    }
  transpose_tile((const uint32_t*)rows_out, row / 4, (uint32_t*)out);
}

template <class R>
void layout_values(RowPointers rows, int64_t at, int D, char* out) {
  using E = typename R::Engine;
  for (int c = 0; c < chunks<E>(D); c++)
    for (int t = 0; t < TILE; t += E::STEP, out += 4 * sizeof(typename E::Vec)) {
      typename E::Vec v[4];
      E::template values<R>(rows + t, at, c, D, v);
      for (int j = 0; j < 4; j++) store(out + j * sizeof v[0], v[j]);
    }
}

// Scores of n prepared queries: x [n][TILE], without their factors.
template <class R>
void all_scores(const char* q, int n, int D, const char* keys, float* x) {
  using E = typename R::Engine;
  const int row = chunks<E>(D) * E::CHUNK * E::BYTES, steps = row / 4;
  typename E::Acc acc[MR][4];
  for (int i = 0; i < n; i += MR)
    for (int p = 0; p < PANELS; p++) {
      const int m = n - i < MR ? n - i : MR;
      product_n<E>(m, q + i * row, row, keys + p * steps * 4 * sizeof(typename E::Vec), steps, acc);
      for (int r = 0; r < m; r++)
        for (int j = 0; j < 4; j++) store(x + (i + r) * TILE + (p * 4 + j) * VL, E::as_float(acc[r][j]));
    }
}

// out[i] = out[i] * fade[i] + factor[i] * (p[i] . v) for n queries; p [n][TILE] packed, out as accumulate() has it.
template <class R>
void all_outputs(const char* p, int n, int D, const char* values, const float* factor, const float* fade, float* out) {
  using E = typename R::Engine;
  const int64_t stride = chunks<E>(D) * 4 * VL;
  const int steps = TILE / E::STEP;
  typename E::Acc acc[MR][4];
  for (int c = 0; c < chunks<E>(D); c++)
    for (int i = 0; i < n; i += MR) {
      const int m = n - i < MR ? n - i : MR;
      product_n<E>(m, p + i * TILE * E::BYTES, TILE * E::BYTES, values + c * steps * 4 * sizeof(typename E::Vec), steps, acc);
      for (int r = 0; r < m; r++)
        for (int j = 0; j < 4; j++) {
          float* o = out + (i + r) * stride + (c * 4 + j) * VL;
          store(o, madd(E::as_float(acc[r][j]), splat(factor[i + r]), load<VF>(o) * fade[i + r]));
        }
    }
}

struct ExtendOps {
  void (*pack_keys)(RowPointers, int64_t, int, char*, char*);
  void (*scores)(const char*, int, int, const char*, float*);
  void (*pack_values)(RowPointers, int64_t, int, char*);
  void (*outputs)(const char*, int, int, const char*, const float*, const float*, float*);
  ExtendOps(const Call& c, const Reading& reading) {
    const auto keys = [&](auto r) { pack_keys = layout_keys<decltype(r)>, scores = all_scores<decltype(r)>; };
    const auto values = [&](auto r) { pack_values = layout_values<decltype(r)>, outputs = all_outputs<decltype(r)>; };
    reading.k_rows ? with_rows(c.dtype, keys) : void(with_reader(c.K, c.dtype, keys));
    reading.v_rows ? with_rows(c.dtype, values) : void(with_reader(c.V, c.dtype, values));
  }
};

// The attention of a block's rows to the keys of one segment -> parts [rows][G][2 + Dv], as merge() takes them.
void extend_segment(const Call& c, const Block& b, const Segment& segment, float* parts) {
  static thread_local Arena arena;
  const Plane &K = c.K, &V = c.V;
  const Reading reading(c, false);
  const ExtendOps ops(c, reading);
  const int n = (b.r1 - b.r0) * c.G, q_bytes = reading.key.bytes(K.D), floats = reading.value.floats(V.D);
  const int k_stride = (K.D + 15) & ~15, v_stride = (V.D + 15) & ~15, k_packed = TILE * q_bytes;
  const int v_packed = TILE * floats * 4;  // at most
  arena.reset();
  char* q = arena.take<char>(n * q_bytes);
  float* acc = arena.take<float>(n * floats);
  Query* query = arena.take<Query>(n);
  float* x = arena.take<float>(n * TILE);
  char* packed = arena.take<char>(n * TILE * 4);
  float *factor = arena.take<float>(n), *fade = arena.take<float>(n);
  Tile& tile = *arena.take<Tile>(1);
  float* scales = arena.take<float>(4 * TILE);
  char *k_rows_packed = arena.take<char>(k_packed), *keys = arena.take<char>(k_packed), *values = arena.take<char>(v_packed);
  float *k_rows = arena.take<float>(TILE * k_stride + VL), *v_rows = arena.take<float>(TILE * v_stride + VL);
  float* one = arena.take<float>(K.D);
  memset(acc, 0, size_t(n) * floats * 4);
  for (int i = 0; i < n; i++) {
    load_row(c.q, c.dtype, b.r0 + i / c.G, b.h * c.G + i % c.G, K.D, one);
    if (K.rotate) hadamard(one, K.D);
    fold(K, b.h, one, query[i]);
    query[i].factor *= reading.key.prepare(one, K.D, q + i * q_bytes);
  }
  for (int start = segment.first / TILE * TILE; start < segment.last; start += TILE) {
    tile.find(c, b.request, start, segment.first, segment.last, b.h);
    const KeyScales s = key_scales(c, tile, b.h, scales);
    const char *k_to[TILE], *v_to[TILE];
    if (reading.k_rows) dequantize(K, c.dtype, tile.k, tile, b.h, k_rows, k_stride, k_to);
    if (reading.v_rows) dequantize(V, c.dtype, tile.v, tile, b.h, v_rows, v_stride, v_to);
    ops.pack_keys(reading.k_rows ? k_to : tile.k, reading.k_rows ? 0 : b.h * K.head, K.D, k_rows_packed, keys);
    ops.pack_values(reading.v_rows ? v_to : tile.v, reading.v_rows ? 0 : b.h * V.head, V.D, values);
    int from = 0;  // earlier rows see no key of this tile
    while (c.positions[b.r0 + from / c.G] < start) from += c.G;
    ops.scores(q + from * q_bytes, n - from, K.D, keys, x + from * TILE);
    for (int i = from; i < n; i++) {
      const int64_t position = c.positions[b.r0 + i / c.G], oldest = c.window ? position - c.window + 1 : 0;
      const int t0 = int(oldest > start + tile.t0 ? oldest - start : tile.t0);
      const int t1 = int(position + 1 < start + tile.t1 ? position + 1 - start : tile.t1);
      float* w = x + i * TILE;
      if (t0 >= t1) {  // its window begins later
        memset(w, 0, TILE * 4);
        fade[i] = 1.f;
      } else
        fade[i] = weigh(c, s, t0, t1, query[i], w);
      factor[i] = reading.value.pack(w, TILE, packed + i * TILE * reading.value.bytes);
    }
    ops.outputs(packed + from * TILE * reading.value.bytes, n - from, V.D, values, factor + from, fade + from,
                acc + from * floats);
  }
  for (int i = 0; i < n; i++, parts += 2 + V.D) {
    reading.value.unpermute(acc + i * floats, V.D, parts + 2);
    unfold(V, b.h, query[i], parts + 2);
    parts[0] = query[i].best, parts[1] = query[i].total;
  }
}

void extend(const Call& c, const Block& b) {
  static thread_local std::vector<float> parts;
  const size_t row = size_t(c.G) * (2 + c.V.D), one = (b.r1 - b.r0) * row;
  if (parts.size() < b.count * one) parts.resize(b.count * one);
  for (int i = 0; i < b.count; i++) {
    const Segment& s = b.segments[i];
    extend_segment(as_seen(c, s.k_raw, s.v_raw), b, s, parts.data() + i * one);
  }
  const float* of_row[MAX_SEGMENTS];
  for (int r = b.r0; r < b.r1; r++) {
    for (int i = 0; i < b.count; i++) of_row[i] = parts.data() + i * one + (r - b.r0) * row;
    merge(c, r, b.h, of_row, b.count);
  }
}

}  // namespace
}  // namespace qkv
