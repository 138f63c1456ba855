// One query row per unit of work: attention to a chunk of its request's keys, and the merge of chunks.
//
// All kv heads of a tile are walked together, so that a page is read whole. A row's result depends on its own keys and on
// nothing else, to the bit: tiles and chunks are counted from position 0.
// Scales never touch single codes: static K scales are folded into q, token scales into scores (K) or probabilities (V),
// static V scales into the output. Zero points become one number per query or per key.
#pragma once
#include "pages.h"

namespace qkv {
namespace {

struct Arena {  // a thread's memory for one unit, kept between calls
  std::vector<char> bytes;
  size_t used = 0;
  void reset(size_t size) {
    if (bytes.size() < size + 64) bytes.resize(size + 64);
    used = (64 - (uintptr_t)bytes.data() % 64) % 64;
  }
  template <class T>
  T* take(size_t n) {
    T* p = (T*)(bytes.data() + used);
    used += (n * sizeof(T) + 63) & ~size_t(63);
    return p;
  }
};

constexpr float LOG2E = 1.44269504f;
constexpr float LOWEST = -1e30f;  // below every score, and finite: its differences are not NaN

INLINE void load_row(const char* p, Code dtype, int D, float* out) {
  switch (dtype) {
    case Code::BF16:
      for (int d = 0; d < D; d++) out[d] = bits_to_float(uint32_t(((const uint16_t*)p)[d]) << 16);
      break;
    case Code::F16:
      for (int d = 0; d < D; d++) out[d] = from_half(((const uint16_t*)p)[d]);
      break;
    default: memcpy(out, p, D * 4);
  }
}

INLINE void load_row(const Rows& rows, Code dtype, int64_t row, int head, int D, float* out) {
  load_row(rows.data + row * rows.row + head * rows.head, dtype, D, out);
}

INLINE void store_row(const Rows& rows, Code dtype, int64_t row, int head, int D, const float* x) {
  char* p = rows.data + row * rows.row + head * rows.head;
  switch (dtype) {
    case Code::BF16:
      for (int d = 0; d < D; d++) ((uint16_t*)p)[d] = to_bf16(x[d]);
      break;
    case Code::F16:
      for (int d = 0; d < D; d++) ((uint16_t*)p)[d] = to_half(x[d]);
      break;
    default: memcpy(p, x, D * 4);
  }
}

// The passes of the transform that stay within a vector: a + b where the lane's bit is clear, a - b where it is set.
template <int STEP>
INLINE VF butterflies(VF v) {
  if constexpr (STEP < VL) {
    const VI minus = (lane_numbers() & STEP) != 0;
    return butterflies<2 * STEP>(exchange<STEP>(v) + (VF)((VI)v ^ (minus & INT32_MIN)));
  }
  return v;
}

// Blocks of the largest power of two dividing D, as reference/hadamard.py does it, operation by operation.
INLINE void hadamard(float* x, int D) {
  const int n = D & -D;
  int step = 1;
  if (n >= VL)
    for (int d = 0; d < D; d += step = VL) store(x + d, butterflies<1>(load<VF>(x + d)));
  for (; step < n; step *= 2)
    for (int d = 0; d < D; d += 2 * step)
      for (int i = d; i < d + step; i++) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b, x[i + step] = a - b;
      }
  const float scale = float(1 / std::sqrt(double(n)));
  for (int d = 0; d < D; d++) x[d] *= scale;
}

struct Query {     // one query head of the unit
  float factor;    // of score()'s dots: what prepare() left out
  float bias;      // from static zero points of K
  float sum;       // of q: what a token zero point of K is multiplied with
  float best, total, zero;  // running maximum and sum of weights (base 2), and sum of weights times V's token zeros
};

// Scale factors of one head's keys, [TILE] each; null where the format has none.
struct KeyScales {
  const float *k_scale, *k_zero, *v_scale, *v_zero;
};

// K row zero points act on the score as `+ zero * sum(q)`, V's as `+ weight * zero`: for code zeros the factor is -scale * zero.
INLINE void token_zeros(const Plane& p, const Tile& tile, int h, const float* scale, float* out) {
  token_scales(p, p.zeros, tile, h, out);
  if (p.zero == CODE_ZERO)
    for (int t = 0; t < TILE; t += VL) store(out + t, -load<VF>(out + t) * load<VF>(scale + t));
}

INLINE KeyScales key_scales(const Call& c, const Tile& tile, int h, float* out) {  // out [4 * TILE]
  const Plane &K = c.K, &V = c.V;
  KeyScales s{};
  if (K.scale == TOKEN) token_scales(K, K.scales, tile, h, out), s.k_scale = out;
  if (K.scale == TOKEN && K.zero != NO_ZERO) token_zeros(K, tile, h, s.k_scale, out + TILE), s.k_zero = out + TILE;
  if (V.scale == TOKEN) token_scales(V, V.scales, tile, h, out + 2 * TILE), s.v_scale = out + 2 * TILE;
  if (V.scale == TOKEN && V.zero != NO_ZERO) token_zeros(V, tile, h, s.v_scale, out + 3 * TILE), s.v_zero = out + 3 * TILE;
  return s;
}

// v where t0 <= t + lane < t1, else `other`.
INLINE VF keep(VF v, int t, int t0, int t1, float other) {
  const VI lane = lane_numbers();
  const VI inside = (lane >= t0 - t) & (lane < t1 - t);
  return (VF)(((VI)v & inside) | ((VI)splat(other) & ~inside));
}

// Dots of one query with a tile, x [TILE], become weights in place. Returns by how much earlier sums shrink.
INLINE float weigh(const Call& c, const KeyScales& s, int t0, int t1, Query& q, float* x) {
  VF top = splat(LOWEST), total = VF{}, zeros = VF{};
  const float scaling = c.softcap ? c.scaling / c.softcap : c.scaling * LOG2E, factor = q.factor * scaling, bias = q.bias * scaling;
  const bool partial = t0 > 0 || t1 < TILE;
  for (int t = 0; t < TILE; t += VL) {
    VF v = load<VF>(x + t) * factor;
    if (s.k_scale) v *= load<VF>(s.k_scale + t);
    if (s.k_zero) v = madd(load<VF>(s.k_zero + t), splat(q.sum * scaling), v);
    v += bias;
    if (c.softcap) v = tanhv(v) * (c.softcap * LOG2E);
    if (partial) v = keep(v, t, t0, t1, LOWEST);
    top = vmax(top, v);
    store(x + t, v);
  }
  const float highest = hmax(top), best = highest > q.best ? highest : q.best;
  for (int t = 0; t < TILE; t += VL) {
    VF w = exp2v(load<VF>(x + t) - best);
    if (partial) w = keep(w, t, t0, t1, 0.f);
    total += w;
    if (s.v_zero) zeros = madd(w, load<VF>(s.v_zero + t), zeros);
    if (s.v_scale) w *= load<VF>(s.v_scale + t);
    store(x + t, w);
  }
  const float fade = exp2v(splat(q.best - best))[0];
  q.best = best;
  q.total = q.total * fade + hsum(total);
  if (s.v_zero) q.zero = q.zero * fade + hsum(zeros);
  return fade;
}

// q of one query head: static channel scales are folded into it, one scale per head goes into the factor of its dots.
INLINE void fold(const Plane& K, int h, float* q, Query& out) {
  out = {K.head_scale ? K.head_scale[h] : 1.f, 0.f, 0.f, LOWEST, 0.f, 0.f};
  const float *s = K.channel_scale ? K.channel_scale + int64_t(h) * K.D : nullptr;
  const float *z = K.static_zero ? K.static_zero + int64_t(h) * K.D : nullptr;
  for (int d = 0; d < K.D; d++) out.sum += q[d];
  for (int d = 0; z && d < K.D; d++) out.bias += K.zero == CODE_ZERO ? -q[d] * z[d] * (s ? s[d] : out.factor) : q[d] * z[d];
  for (int d = 0; s && d < K.D; d++) q[d] *= s[d];
}

// Static V scales, all V zero points and the rotation, on the unnormalised output of one query head.
INLINE void unfold(const Plane& V, int h, const Query& q, float* out) {
  const float *s = V.channel_scale ? V.channel_scale + int64_t(h) * V.D : nullptr, head = V.head_scale ? V.head_scale[h] : 1.f;
  const float *z = V.static_zero ? V.static_zero + int64_t(h) * V.D : nullptr;
  for (int d = 0; z && V.zero == CODE_ZERO && d < V.D; d++) out[d] -= z[d] * q.total;
  for (int d = 0; d < V.D; d++) out[d] = out[d] * (s ? s[d] : head) + q.zero;
  for (int d = 0; z && V.zero == FLOAT_ZERO && d < V.D; d++) out[d] += z[d] * q.total;
  if (V.rotate) hadamard(out, V.D);  // weighted sums of rotated values, rotated back once
}

// What the formats of K and V ask for. Scales of groups and blocks touch single codes, so that rows are dequantized first;
// but for one query it is less work to fold a block's K scales into q, and groups' V scales into the weights.
struct Plan {
  KeyOps key{};
  ValueOps value{};
  bool k_rows, v_rows;                         // whether rows are dequantized first
  bool k_blocks = false, v_groups = false;     // whether scales are folded
  explicit Plan(const Call& c, bool one_query) {
    const Plane &K = c.K, &V = c.V;
    k_rows = !with_reader(K, c.dtype, [&](auto r) { key = key_ops<decltype(r)>(); }) || K.scale == GROUP;
    v_rows = !with_reader(V, c.dtype, [&](auto r) { value = value_ops<decltype(r)>(); }) || V.scale == BLOCK_CHANNEL;
    if (!k_rows && K.scale == BLOCK_CHANNEL) k_blocks = one_query && c.B % 4 == 0, k_rows = !k_blocks;
    if (!v_rows && V.scale == GROUP) {
      const int n = V.D / V.group;
      v_groups = one_query && value.accumulate_groups && V.group % 32 == 0 && n <= MAX_GROUPS && !(n & (n - 1)) &&
                 V.s_token == n * (V.half_scale ? 2 : 4);
      v_rows = !v_groups;
    }
    if (k_rows) with_rows(c.dtype, [&](auto r) { key = key_ops<decltype(r)>(); });
    if (v_rows) with_rows(c.dtype, [&](auto r) { value = value_ops<decltype(r)>(); });
  }
};

// Dots of the queries q [G][D rounded up to VL, zeros] of kv head h with the keys of a tile, the scales and zeros of each block folded into q: x [G][TILE].
INLINE void score_blocks(const Call& c, const KeyOps& key, const Tile& tile, int h, const float* q, Ahead ahead, char* prepared, float* x) {
  const Plane& K = c.K;
  const int D = K.D, stride = (D + VL - 1) / VL * VL, bytes = key.bytes(D);
  float s[D + VL], z[D + VL], one[D + VL], factor[MAX_GROUP], bias[MAX_GROUP];
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

struct GroupScales {  // of the keys of a tile: V's value = code * scale + zero
  float scale[MAX_GROUPS * TILE], zero[MAX_GROUPS * TILE];
};

INLINE void load_groups(const Plane& V, const Tile& tile, int h, GroupScales& s) {
  const int n = V.D / V.group * TILE;
  group_scales(V, V.scales, tile, h, s.scale);
  if (V.zero != NO_ZERO) group_scales(V, V.zeros, tile, h, s.zero);
  for (int i = 0; V.zero == CODE_ZERO && i < n; i += VL) store(s.zero + i, -load<VF>(s.zero + i) * load<VF>(s.scale + i));
}

// Weights x [TILE] of one query head, times the scales of each group: packed [groups][G][TILE], factor [groups][G]; and their sums
// with the groups' zeros, zero [groups] vectors.
INLINE void weigh_groups(const Plane& V, const ValueOps& value, const GroupScales& s, const float* x, int G, float fade, char* packed, float* factor, VF* zero) {
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

void decode(const Call& call, const Unit& u) {
  static thread_local Arena arena;
  const Call c = as_seen(call, u.k_raw, u.v_raw);
  const Plane &K = c.K, &V = c.V;
  const Plan plan(c, true);
  const int n = (u.h1 - u.h0) * c.G, q_bytes = plan.key.bytes(K.D), floats = plan.value.floats(V.D);
  const int k_stride = (K.D + 15) & ~15, v_stride = (V.D + 15) & ~15, groups = plan.v_groups ? V.D / V.group : 1;
  const int stride = (K.D + VL - 1) / VL * VL;  // of q as floats
  arena.reset(size_t(n) * (q_bytes + floats * 4 + sizeof(Query) + stride * 4 + groups * sizeof(VF)) + 2 * sizeof(Tile) + sizeof(GroupScales) +
              (8 + MAX_GROUP * (1 + groups)) * TILE * 4 + (TILE * (k_stride + v_stride) + 2 * VL) * 4 + 4096);
  char* q = arena.take<char>(n * q_bytes);
  float* acc = arena.take<float>(n * floats);
  Query* query = arena.take<Query>(n);
  Tile* tiles = arena.take<Tile>(2);
  float* scales = arena.take<float>(4 * TILE);
  float* x = arena.take<float>(MAX_GROUP * TILE);
  char* packed = arena.take<char>(groups * MAX_GROUP * TILE * 4);
  float* k_rows = arena.take<float>(TILE * k_stride + VL);
  float* v_rows = arena.take<float>(TILE * v_stride + VL);
  float* plain = arena.take<float>(n * stride);
  memset(plain, 0, n * stride * 4);
  VF* zeros = arena.take<VF>(n * groups);
  GroupScales& group = *arena.take<GroupScales>(1);
  memset(acc, 0, size_t(n) * floats * 4);
  memset(zeros, 0, n * groups * sizeof(VF));
  memset(group.zero, 0, sizeof group.zero);
  for (int i = 0; i < n; i++) {
    float* one = plain + i * stride;
    load_row(c.q, c.dtype, u.row, u.h0 * c.G + i, K.D, one);
    if (K.rotate) hadamard(one, K.D);  // (R q) . (R k) = q . k, so keys are never rotated back
    fold(K, u.h0 + i / c.G, one, query[i]);
    if (!plan.k_blocks) query[i].factor *= plan.key.prepare(one, K.D, q + i * q_bytes);
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
      if (plan.k_rows) dequantize(K, c.dtype, tile.k, tile, h, k_rows, k_stride, k_to);
      const int i = (h - u.h0) * c.G;
      float factor[MAX_GROUPS * MAX_GROUP], fade[MAX_GROUP];
      const Ahead values{tile.v, h * V.head, V.row_bytes()};
      if (plan.k_blocks)
        score_blocks(c, plan.key, tile, h, plain + i * stride, values, q, x);
      else
        plan.key.score(plan.k_rows ? k_to : tile.k, values, plan.k_rows ? 0 : h * K.head,
                       q + i * q_bytes, c.G, K.D, tile.t0 & ~3, (tile.t1 + 3) & ~3, x);
      if (plan.v_groups) load_groups(V, tile, h, group);
      for (int g = 0; g < c.G; g++) {
        char* p = packed + g * TILE * plan.value.bytes;
        fade[g] = weigh(c, s, tile.t0, tile.t1, query[i + g], x + g * TILE);
        if (plan.v_groups)
          weigh_groups(V, plan.value, group, x + g * TILE, c.G, fade[g], p, factor + g, zeros + (i + g) * groups);
        else
          factor[g] = plan.value.pack(x + g * TILE, TILE, p);
      }
      if (plan.v_rows) dequantize(V, c.dtype, tile.v, tile, h, v_rows, v_stride, v_to);
      const bool last = h + 1 == u.h1;
      const Ahead keys{last ? then->k : tile.k, (last ? u.h0 : h + 1) * K.head, (last && !more) ? 0 : K.row_bytes()};
      const auto accumulate = plan.v_groups ? plan.value.accumulate_groups : plan.value.accumulate;
      accumulate(plan.v_rows ? v_to : tile.v, keys, plan.v_rows ? 0 : h * V.head,
                 packed, c.G, V.D, tile.t0 & ~1, (tile.t1 + 1) & ~1, factor, fade, acc + i * floats, V.group);
    }
    Tile* t = now;
    now = then, then = t;
  }
  for (int i = 0; i < n; i++) {
    float* part = u.part + size_t(i) * (2 + V.D);
    plan.value.unpermute(acc + i * floats, V.D, part + 2);
    for (int d = 0; plan.v_groups && d < V.D; d += V.group) {
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
    const float sink = c.sinks ? c.sinks[h * c.G + g] * LOG2E : LOWEST;
    float best = sink, total = 0.f;
    for (int64_t i = 0; i < count; i++) best = parts[i][at] > best ? parts[i][at] : best;
    for (int d = 0; d < D; d++) out[d] = 0.f;
    for (int64_t i = 0; i < count; i++) {
      const float w = exp2v(splat(parts[i][at] - best))[0];
      total += w * parts[i][at + 1];
      for (int d = 0; d < D; d++) out[d] += w * parts[i][at + 2 + d];
    }
    if (c.sinks) total += exp2v(splat(sink - best))[0];
    for (int d = 0; d < D; d++) out[d] /= total;
    store_row(c.out, c.dtype, row, h * c.G + g, D, out);
  }
}

}  // namespace
}  // namespace qkv
