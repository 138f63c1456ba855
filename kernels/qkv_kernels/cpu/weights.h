// From dots of q and k to weights of v: online softmax, and where scales go that do not touch single codes. Static K scales are
// folded into q, token scales into scores (K) or weights (V), static V scales into the output. Zero points become one number per
// query or per key.
#pragma once
#include <cstdint>

#include "args.h"
#include "pages.h"
#include "rows.h"
#include "vec.h"

namespace qkv {
namespace {

constexpr float LOG2E = 1.44269504f;
constexpr float LOWEST = -1e30f;  // below every score, and finite: its differences are not NaN

struct Query {              // one query head of the unit
  float factor;             // of score()'s dots: what prepare() left out
  float bias;               // from static zero points of K
  float sum;                // of q: what a token zero point of K is multiplied with
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
  const float scaling = c.softcap ? c.scaling / c.softcap : c.scaling * LOG2E, factor = q.factor * scaling,
              bias = q.bias * scaling;
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
  const float* s = K.channel_scale ? K.channel_scale + int64_t(h) * K.D : nullptr;
  const float* z = K.static_zero ? K.static_zero + int64_t(h) * K.D : nullptr;
  for (int d = 0; d < K.D; d++) out.sum += q[d];
  for (int d = 0; z && d < K.D; d++) out.bias += K.zero == CODE_ZERO ? -q[d] * z[d] * (s ? s[d] : out.factor) : q[d] * z[d];
  for (int d = 0; s && d < K.D; d++) q[d] *= s[d];
}

// Static V scales, all V zero points and the rotation, on the unnormalised output of one query head.
INLINE void unfold(const Plane& V, int h, const Query& q, float* out) {
  const float *s = V.channel_scale ? V.channel_scale + int64_t(h) * V.D : nullptr, head = V.head_scale ? V.head_scale[h] : 1.f;
  const float* z = V.static_zero ? V.static_zero + int64_t(h) * V.D : nullptr;
  for (int d = 0; z && V.zero == CODE_ZERO && d < V.D; d++) out[d] -= z[d] * q.total;
  for (int d = 0; d < V.D; d++) out[d] = out[d] * (s ? s[d] : head) + q.zero;
  for (int d = 0; z && V.zero == FLOAT_ZERO && d < V.D; d++) out[d] += z[d] * q.total;
  if (V.rotate) hadamard(out, V.D);  // weighted sums of rotated values, rotated back once
}

}  // namespace
}  // namespace qkv
