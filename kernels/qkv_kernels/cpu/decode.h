// One query row per unit of work: attention to a chunk of its request's keys, and the merge of chunks.
//
// All kv heads of a tile are walked together, so that a page is read whole. A row's result depends on its own keys and on
// nothing else, to the bit: tiles and chunks are counted from position 0.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "args.h"
#include "fold.h"
#include "pages.h"
#include "rows.h"
#include "tiles.h"
#include "vec.h"
#include "weights.h"

namespace qkv {
namespace {

void decode(const Call& call, const Unit& u) {
  static thread_local Arena arena;
  const Call c = as_seen(call, u.k_raw, u.v_raw);
  const Plane &K = c.K, &V = c.V;
  const Reading reading(c, true);
  const int n = (u.h1 - u.h0) * c.G, q_bytes = reading.key.bytes(K.D), floats = reading.value.floats(V.D);
  const int k_stride = (K.D + 15) & ~15, v_stride = (V.D + 15) & ~15, groups = reading.v_groups ? V.D / V.group : 1;
  const int k_groups = reading.k_groups ? K.D / K.group : 0;
  const int stride = (K.D + VL - 1) / VL * VL;  // of q as floats
  arena.reset();
  char* q = arena.take<char>(n * q_bytes);
  float* acc = arena.take<float>(n * floats);
  Query* query = arena.take<Query>(n);
  Tile* tiles = arena.take<Tile>(2);
  float* scales = arena.take<float>(4 * TILE);
  float* x = arena.take<float>(MAX_G * TILE);
  char* packed = arena.take<char>(groups * MAX_G * TILE * 4);
  float* k_rows = arena.take<float>(TILE * k_stride + VL);
  float* v_rows = arena.take<float>(TILE * v_stride + VL);
  float* plain = arena.take<float>(n * stride);
  memset(plain, 0, n * stride * 4);
  VF* zeros = arena.take<VF>(n * groups);
  GroupScales *k_group = arena.take<GroupScales>(2), *v_group = k_group + 1;
  float *q_factor = arena.take<float>(n), *q_sums = arena.take<float>(n * k_groups);
  memset(acc, 0, size_t(n) * floats * 4);
  memset(zeros, 0, n * groups * sizeof(VF));
  for (int i = 0; i < n; i++) {
    float* one = plain + i * stride;
    load_row(c.q, c.dtype, u.row, u.h0 * c.G + i, K.D, one);
    if (K.rotate) hadamard(one, K.D);  // (R q) . (R k) = q . k, so keys are never rotated back
    fold(K, u.h0 + i / c.G, one, query[i]);
    if (reading.k_blocks) continue;
    q_factor[i] = reading.key.prepare(one, K.D, q + i * q_bytes);
    if (!reading.k_groups) query[i].factor *= q_factor[i];
    for (int d = 0; reading.k_groups && d < K.D; d += K.group) {
      float& sum = q_sums[i * k_groups + d / K.group] = 0.f;
      for (int j = d; j < d + K.group; j++) sum += one[j];
    }
  }

  Tile *now = tiles, *then = tiles + 1;
  int start = u.first / TILE * TILE;
  now->find(c, u.request, start, u.first, u.last, u.h0);
  prefetch_scales(K, *now, u.h0, u.h1), prefetch_scales(V, *now, u.h0, u.h1);
  for (; start < u.last; start += TILE) {
    const bool more = start + TILE < u.last;
    if (more) {
      then->find(c, u.request, start + TILE, u.first, u.last, u.h0);
      prefetch_scales(K, *then, u.h0, u.h1), prefetch_scales(V, *then, u.h0, u.h1);
    }
    const Tile& tile = *now;
    for (int h = u.h0; h < u.h1; h++) {
      const KeyScales s = key_scales(c, tile, h, scales);
      const char *k_to[TILE], *v_to[TILE];
      if (reading.k_rows) dequantize(K, c.dtype, tile.k, tile, h, k_rows, k_stride, k_to);
      const int i = (h - u.h0) * c.G;
      float factor[MAX_GROUPS * MAX_G], fade[MAX_G];
      const Ahead values{tile.v, h * V.head, V.row_bytes()};
      if (reading.k_blocks)
        score_blocks(c, reading.key, tile, h, plain + i * stride, values, q, x);
      else if (reading.k_groups) {
        load_groups(K, tile, h, *k_group);
        score_groups(c, reading.key, tile, h, q + i * q_bytes, q_factor + i, q_sums + i * k_groups, values, *k_group, x);
      } else
        reading.key.score(reading.k_rows ? k_to : tile.k, values, reading.k_rows ? 0 : h * K.head, q + i * q_bytes, c.G, K.D,
                          tile.t0 & ~3, (tile.t1 + 3) & ~3, x);
      if (reading.v_groups) load_groups(V, tile, h, *v_group);
      for (int g = 0; g < c.G; g++) {
        char* p = packed + g * TILE * reading.value.bytes;
        fade[g] = weigh(c, s, tile.t0, tile.t1, query[i + g], x + g * TILE);
        if (reading.v_groups)
          weigh_groups(V, reading.value, *v_group, x + g * TILE, c.G, fade[g], p, factor + g, zeros + (i + g) * groups);
        else
          factor[g] = reading.value.pack(x + g * TILE, TILE, p);
      }
      if (reading.v_rows) dequantize(V, c.dtype, tile.v, tile, h, v_rows, v_stride, v_to);
      const bool last = h + 1 == u.h1;
      const Ahead keys{last ? then->k : tile.k, (last ? u.h0 : h + 1) * K.head, (last && !more) ? 0 : K.row_bytes()};
      const auto accumulate = reading.v_groups ? reading.value.accumulate_groups : reading.value.accumulate;
      accumulate(reading.v_rows ? v_to : tile.v, keys, reading.v_rows ? 0 : h * V.head, packed, c.G, V.D, tile.t0 & ~1,
                 (tile.t1 + 1) & ~1, factor, fade, acc + i * floats, V.group);
    }
    Tile* t = now;
    now = then, then = t;
  }
  for (int i = 0; i < n; i++) {
    float* part = u.part + size_t(i) * (2 + V.D);
    reading.value.unpermute(acc + i * floats, V.D, part + 2);
    for (int d = 0; reading.v_groups && d < V.D; d += V.group) {
      const float zero = hsum(zeros[i * groups + d / V.group]);
      for (int j = d; j < d + V.group; j++) part[2 + j] += zero;
    }
    unfold(V, u.h0 + i / c.G, query[i], part + 2);
    part[0] = query[i].best, part[1] = query[i].total;
  }
}

// The parts of one row and kv head, in order of their keys, to its output.
void merge(const Call& c, int row, int h, const float* const* parts, int64_t count) {
  const int D = c.V.D;
  float out[D];
  for (int g = 0; g < c.G; g++) {
    const int64_t at = int64_t(g) * (2 + D);
    const float sink = c.sink_logits ? c.sink_logits[h * c.G + g] * LOG2E : LOWEST;
    float best = sink, total = 0.f;
    for (int64_t i = 0; i < count; i++) best = parts[i][at] > best ? parts[i][at] : best;
    for (int d = 0; d < D; d++) out[d] = 0.f;
    for (int64_t i = 0; i < count; i++) {
      const float w = exp2v(splat(parts[i][at] - best))[0];
      total += w * parts[i][at + 1];
      for (int d = 0; d < D; d++) out[d] += w * parts[i][at + 2 + d];
    }
    if (c.sink_logits) total += exp2v(splat(sink - best))[0];
    for (int d = 0; d < D; d++) out[d] /= total;
    store_row(c.out, c.dtype, row, h * c.G + g, D, out);
  }
}

}  // namespace
}  // namespace qkv
