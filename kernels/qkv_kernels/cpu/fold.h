// Scales of a group of channels or of one channel of a block differ within a row. Prefill multiplies every code by its scale
// once, when it dequantizes the row. For a single query that is more work than to fold the scales elsewhere: those of a block's
// K into q, that of a group of K into the sum of the group's products, and that of a group of V into the weights.
#pragma once
#include <cstdint>
#include <cstring>

#include "args.h"
#include "pages.h"
#include "tiles.h"
#include "vec.h"
#include "weights.h"

namespace qkv {
namespace {

// Whether scales by groups of channels can be taken a vector at a time.
INLINE bool groups_fold(const Plane& p) {
  const int n = p.D / p.group;
  return p.group % 32 == 0 && n <= MAX_GROUPS && !(n & (n - 1)) && p.s_token == n * (p.half_scale ? 2 : 4);
}

// How the codes of this call become scores and outputs: by which functions, and what happens to scales on the way.
struct Reading {
  KeyOps key{};
  ValueOps value{};
  bool k_rows, v_rows;                                        // whether rows are dequantized before the product
  bool k_blocks = false, k_groups = false, v_groups = false;  // whether scales of blocks or groups are folded
  Reading(const Call& c, bool one_query) {
    const Plane &K = c.K, &V = c.V;
    k_rows = !with_reader(K, c.dtype, [&](auto r) { key = key_ops<decltype(r)>(); });
    v_rows = !with_reader(V, c.dtype, [&](auto r) { value = value_ops<decltype(r)>(); });
    k_blocks = one_query && !k_rows && K.scale == BLOCK_CHANNEL && c.B % 4 == 0;
    k_groups = one_query && !k_rows && K.scale == GROUP && key.score_groups && groups_fold(K);
    v_groups = one_query && !v_rows && V.scale == GROUP && value.accumulate_groups && groups_fold(V);
    k_rows |= (K.scale == BLOCK_CHANNEL && !k_blocks) || (K.scale == GROUP && !k_groups);
    v_rows |= V.scale == BLOCK_CHANNEL || (V.scale == GROUP && !v_groups);
    if (k_rows) with_rows(c.dtype, [&](auto r) { key = key_ops<decltype(r)>(); });
    if (v_rows) with_rows(c.dtype, [&](auto r) { value = value_ops<decltype(r)>(); });
  }
};

// Dots of the queries q [G][D rounded up to VL, zeros] of kv head h with the keys of a tile, the scales and zeros of each block
// folded into q: x [G][TILE].
INLINE void score_blocks(const Call& c, const KeyOps& key, const Tile& tile, int h, const float* q, Ahead ahead, char* prepared,
                         float* x) {
  const Plane& K = c.K;
  const int D = K.D, stride = (D + VL - 1) / VL * VL, bytes = key.bytes(D);
  float s[D + VL], z[D + VL], one[D + VL], factor[MAX_G], bias[MAX_G];
  for (int r = 0; r < tile.count; r++) {
    const Run& run = tile.runs[r];
    const int64_t at = run.block * K.s_block + h * K.s_head;
    scales_at(K, K.scales + at, D, s);
    if (K.zero != NO_ZERO) scales_at(K, K.zeros + at, D, z);
    for (int i = 0; i < VL; i++) s[D + i] = z[D + i] = 0.f;
    for (int g = 0; g < c.G; g++) {
      const float* from = K.zero == CODE_ZERO ? one : q + g * stride;  // of what zeros are multiplied with
      VF sum = VF{};
      for (int d = 0; d < D; d += VL) {
        store(one + d, load<VF>(q + g * stride + d) * load<VF>(s + d));
        if (K.zero != NO_ZERO) sum = madd(load<VF>(from + d), load<VF>(z + d), sum);
      }
      bias[g] = K.zero == CODE_ZERO ? -hsum(sum) : hsum(sum);
      factor[g] = key.prepare(one, D, prepared + g * bytes);
    }
    const int t0 = run.begin & ~3, t1 = (run.end + 3) & ~3;
    key.score(tile.k, ahead, h * K.head, prepared, c.G, D, t0, t1, x);
    for (int g = 0; g < c.G; g++) {
      float* w = x + g * TILE;
      int t = t0;
      for (; t + VL <= t1; t += VL) store(w + t, madd(load<VF>(w + t), splat(factor[g]), splat(bias[g])));
      for (; t < t1; t++) w[t] = w[t] * factor[g] + bias[g];
    }
  }
}

struct GroupScales {  // of the keys of a tile, [groups][TILE]: value = code * scale + zero
  float scale[MAX_GROUPS * TILE], zero[MAX_GROUPS * TILE];
};

INLINE void load_groups(const Plane& p, const Tile& tile, int h, GroupScales& s) {
  const int n = p.D / p.group * TILE;
  group_scales(p, p.scales, tile, h, s.scale);
  if (p.zero != NO_ZERO) group_scales(p, p.zeros, tile, h, s.zero);
  for (int i = 0; p.zero == CODE_ZERO && i < n; i += VL) store(s.zero + i, -load<VF>(s.zero + i) * load<VF>(s.scale + i));
  if (p.zero == NO_ZERO) memset(s.zero, 0, n * 4);
}

// The same for scales of groups. Prepared q with their factors [G], and the sums of q over each group [G][groups].
INLINE void score_groups(const Call& c, const KeyOps& key, const Tile& tile, int h, const char* prepared, const float* factor,
                         const float* sums, Ahead ahead, const GroupScales& s, float* x) {
  const int n = c.K.D / c.K.group;
  key.score_groups(tile.k, ahead, h * c.K.head, prepared, c.G, c.K.D, tile.t0 & ~3, (tile.t1 + 3) & ~3, s.scale, c.K.group, x);
  for (int g = 0; g < c.G; g++)
    for (int t = 0; t < TILE; t += VL) {
      VF v = load<VF>(x + g * TILE + t) * factor[g];
      for (int i = 0; i < n; i++) v = madd(load<VF>(s.zero + i * TILE + t), splat(sums[g * n + i]), v);
      store(x + g * TILE + t, v);
    }
}

// Weights x [TILE] of one query head, times the scales of each group: packed [groups][G][TILE], factor [groups][G]; and their
// sums with the groups' zeros, zero [groups] vectors.
INLINE void weigh_groups(const Plane& V, const ValueOps& value, const GroupScales& s, const float* x, int G, float fade,
                         char* packed, float* factor, VF* zero) {
  const int n = V.D / V.group;
  float scaled[TILE];
  for (int i = 0; i < n; i++) {
    VF sum = zero[i] * fade;
    for (int t = 0; t < TILE; t += VL) {
      const VF w = load<VF>(x + t);
      sum = madd(w, load<VF>(s.zero + i * TILE + t), sum);
      store(scaled + t, w * load<VF>(s.scale + i * TILE + t));
    }
    zero[i] = sum;
    factor[i * G] = value.pack(scaled, TILE, packed + i * G * TILE * value.bytes);
  }
}

}  // namespace
}  // namespace qkv
