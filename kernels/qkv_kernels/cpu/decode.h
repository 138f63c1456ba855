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

struct Plan {  // what the formats of K and V ask for
  KeyOps key{};
  ValueOps value{};
  bool k_rows, v_rows;  // whether rows are dequantized first
  explicit Plan(const Call& c) {
    k_rows = !with_reader(c.K, c.dtype, [&](auto r) { key = key_ops<decltype(r)>(); });
    v_rows = !with_reader(c.V, c.dtype, [&](auto r) { value = value_ops<decltype(r)>(); });
    if (k_rows) key = key_ops<ReadF32>();
    if (v_rows) value = value_ops<ReadF32>();
  }
};

void decode(const Call& call, const Unit& u) {
  static thread_local Arena arena;
  const Call c = as_seen(call, u.k_raw, u.v_raw);
  const Plane &K = c.K, &V = c.V;
  const Plan plan(c);
  const int n = (u.h1 - u.h0) * c.G, q_bytes = plan.key.bytes(K.D), floats = plan.value.floats(V.D);
  const int k_stride = (K.D + 15) & ~15, v_stride = (V.D + 15) & ~15;
  arena.reset(size_t(n) * (q_bytes + floats * 4 + sizeof(Query)) + 2 * sizeof(Tile) + (8 + MAX_GROUP) * TILE * 4 +
              MAX_GROUP * TILE * 4 + (TILE * (k_stride + v_stride) + 2 * VL) * 4 + (K.D + V.D) * 4 + 4096);
  char* q = arena.take<char>(n * q_bytes);
  float* acc = arena.take<float>(n * floats);
  Query* query = arena.take<Query>(n);
  Tile* tiles = arena.take<Tile>(2);
  float* scales = arena.take<float>(4 * TILE);
  float* x = arena.take<float>(MAX_GROUP * TILE);
  char* packed = arena.take<char>(MAX_GROUP * TILE * 4);
  float* k_rows = arena.take<float>(TILE * k_stride + VL);
  float* v_rows = arena.take<float>(TILE * v_stride + VL);
  float* one = arena.take<float>(K.D + V.D);
  memset(acc, 0, size_t(n) * floats * 4);
  for (int i = 0; i < n; i++) {
    load_row(c.q, c.dtype, u.row, u.h0 * c.G + i, K.D, one);
    if (K.rotate) hadamard(one, K.D);  // (R q) . (R k) = q . k, so keys are never rotated back
    fold(K, u.h0 + i / c.G, one, query[i]);
    query[i].factor *= plan.key.prepare(one, K.D, q + i * q_bytes);
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
      if (plan.k_rows) dequantize(K, tile.k, tile, h, k_rows, k_stride, k_to);
      const int i = (h - u.h0) * c.G;
      float factor[MAX_GROUP], fade[MAX_GROUP];
      const Ahead values{tile.v, h * V.head, V.row_bytes()};
      plan.key.score(plan.k_rows ? k_to : tile.k, values, plan.k_rows ? 0 : h * K.head,
                     q + i * q_bytes, c.G, K.D, tile.t0 & ~3, (tile.t1 + 3) & ~3, x);
      for (int g = 0; g < c.G; g++) {
        fade[g] = weigh(c, s, tile.t0, tile.t1, query[i + g], x + g * TILE);
        factor[g] = plan.value.pack(x + g * TILE, TILE, packed + g * TILE * plan.value.bytes);
      }
      if (plan.v_rows) dequantize(V, tile.v, tile, h, v_rows, v_stride, v_to);
      const bool last = h + 1 == u.h1;
      const Ahead keys{last ? then->k : tile.k, (last ? u.h0 : h + 1) * K.head, (last && !more) ? 0 : K.row_bytes()};
      plan.value.accumulate(plan.v_rows ? v_to : tile.v, keys, plan.v_rows ? 0 : h * V.head,
                            packed, c.G, V.D, tile.t0 & ~1, (tile.t1 + 1) & ~1, factor, fade, acc + i * floats);
    }
    Tile* t = now;
    now = then, then = t;
  }
  for (int i = 0; i < n; i++) {
    float* part = u.part + size_t(i) * (2 + V.D);
    plan.value.unpermute(acc + i * floats, V.D, part + 2);
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
