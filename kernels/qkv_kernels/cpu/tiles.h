// The two products of attention on one tile of keys, for any reader: scores (q . k) and output (p . v).
//
// Rows are given by pointers, one per key of the tile, so that a tile may lie on any pages; `at` is added to each
// (the offset of the kv head). `ahead` are the rows that are needed next: prefetched a little at a time, in step with the
// work on this one, because scattered pages cost latency and not bandwidth.
#pragma once
#include <cstdint>
#include <cstring>

#include "args.h"
#include "readers.h"
#include "vec.h"

namespace qkv {
namespace {

using RowPointers = const char* const*;

// Rows to prefetch: those that the next product on this thread reads.
struct Ahead {
  RowPointers rows;
  int64_t at;
  int bytes;
  FORCE void step(int t, int n, int part, int parts) const {  // that part of rows t to t + n
    for (int i = t; i < t + n; i++)
      for (int j = bytes * part / parts & ~63; j < bytes * (part + 1) / parts; j += 64)
        __builtin_prefetch(rows[i] + at + j, 0, 3);
  }
};

template <class E>
INLINE int chunks(int D) {
  return (D + E::CHUNK - 1) / E::CHUNK;
}

// q [D] as floats -> what score() reads; q [chunks * CHUNK] elements of the engine. Returns the factor that score() leaves out.
template <class R>
float prepare(const float* q, int D, char* out) {
  using E = typename R::Engine;
  const int n = chunks<E>(D) * E::CHUNK;
  if (n == D && !R::BYTE_LANES) return E::pack(q, n, out);
  alignas(64) float padded[n];
  for (int i = 0; i < n; i++) padded[i] = i < D ? q[i] : 0.f;
  if (!R::BYTE_LANES) return E::pack(padded, n, out);
  alignas(64) char ordered[n * E::BYTES];
  const float factor = E::pack(padded, n, ordered);
  for (int c = 0; c < n / 64; c++)  // vector u of a chunk holds elements 16 i + 8 u of it, 8 in a row
    for (int i = 0; i < 4; i++)
      for (int u = 0; u < 2; u++) memcpy(out + c * 128 + u * 64 + i * 16, ordered + c * 128 + i * 32 + u * 16, 16);
  return factor;
}

template <class R, int N>
void score_n(RowPointers rows, Ahead ahead, int64_t at, const char* q, int D, int t0, int t1, float* out) {
  using E = typename R::Engine;
  const int count = chunks<E>(D), q_bytes = count * E::CHUNK * E::BYTES;
  for (int t = t0; t < t1; t += 4) {
    typename E::Acc acc[N][4] = {};
    ahead.step(t, 4, 0, 1);
    for (int c = 0; c < count; c++) {
      const char* part = q + c * E::CHUNK * E::BYTES;
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        typename E::Vec key[E::VECS];
        R::load(rows[t + i] + at, c, D, key);
#pragma GCC unroll 4
        for (int g = 0; g < N; g++)
#pragma GCC unroll 4
          for (int u = 0; u < E::VECS; u++)
            acc[g][i] = E::dot(acc[g][i], load<typename E::Vec>(part + g * q_bytes + u * sizeof(typename E::Vec)), key[u]);
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < N; g++) E::sum4(acc[g], out + g * TILE + t);
  }
}

// Dots of n prepared queries with keys t0 to t1 (multiples of 4) of the tile: out [n, TILE].
template <class R>
void score(RowPointers rows, Ahead ahead, int64_t at, const char* q, int n, int D, int t0, int t1, float* out) {
  using E = typename R::Engine;
  const int q_bytes = chunks<E>(D) * E::CHUNK * E::BYTES;
  for (int g = 0; g < n; g += 4, ahead.bytes = 0) {
    const auto kernel = n - g >= 4 ? score_n<R, 4> : n - g == 3 ? score_n<R, 3> : n - g == 2 ? score_n<R, 2> : score_n<R, 1>;
    kernel(rows, ahead, at, q + g * q_bytes, D, t0, t1, out + g * TILE);
  }
}

// The same where groups of channels have scales of their own, [groups][TILE] of the keys: each group's products, times its scale.
template <class R, int N>
void score_groups_n(RowPointers rows, Ahead ahead, int64_t at, const char* q, int D, int t0, int t1, const float* scales,
                    int channels, float* out) {
  using E = typename R::Engine;
  const int count = chunks<E>(D), q_bytes = count * E::CHUNK * E::BYTES;
  for (int t = t0; t < t1; t += 4) {
    VF sum[N][4] = {};
    ahead.step(t, 4, 0, 1);
    for (int c = 0; c < count; c++) {
      const char* part = q + c * E::CHUNK * E::BYTES;
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        typename E::Vec key[E::VECS];
        R::load(rows[t + i] + at, c, D, key);
#pragma GCC unroll 2
        for (int u = 0; u < E::VECS; u++) {
          const VF s = splat(scales[(c * E::CHUNK + u * 32) / channels * TILE + t + i]);
#pragma GCC unroll 4
          for (int g = 0; g < N; g++) {
            const auto dot =
                E::dot(typename E::Acc{}, load<typename E::Vec>(part + g * q_bytes + u * sizeof(typename E::Vec)), key[u]);
            sum[g][i] = madd(E::as_float(dot), s, sum[g][i]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < N; g++) sum4(sum[g], out + g * TILE + t);
  }
}

template <class R>
void score_groups(RowPointers rows, Ahead ahead, int64_t at, const char* q, int n, int D, int t0, int t1, const float* scales,
                  int channels, float* out) {
  using E = typename R::Engine;
  const int q_bytes = chunks<E>(D) * E::CHUNK * E::BYTES;
  for (int g = 0; g < n; g += 4, ahead.bytes = 0) {
    const auto kernel = n - g >= 4   ? score_groups_n<R, 4>
                        : n - g == 3 ? score_groups_n<R, 3>
                        : n - g == 2 ? score_groups_n<R, 2>
                                     : score_groups_n<R, 1>;
    kernel(rows, ahead, at, q + g * q_bytes, D, t0, t1, scales, channels, out + g * TILE);
  }
}

struct Groups {  // of channels: how many weights one is from the next, and its channels
  int64_t stride;
  int channels;
};

template <class R, int N, bool GROUPED>
void accumulate_n(RowPointers rows, Ahead ahead, int64_t at, const char* p, int D, int t0, int t1, const float* factor,
                  const float* fade, float* out, int64_t out_stride, Groups groups) {
  using E = typename R::Engine;
  for (int c = 0; c < chunks<E>(D); c++) {
    typename E::Acc acc[N][4] = {};
    int64_t at_half[2] = {};  // vectors that the weights of accumulators 0 and 1, and of 2 and 3, are away
    if constexpr (GROUPED)
      for (int u = 0; u < 2; u++) at_half[u] = (c * 64 + u * 32) / groups.channels * groups.stride;
    for (int t = t0; t < t1; t += E::STEP) {
      typename E::Vec value[4];
      ahead.step(t, E::STEP, c, chunks<E>(D));
      E::template values<R>(rows + t, at, c, D, value);
#pragma GCC unroll 4
      for (int g = 0; g < N; g++) {
        const typename E::Vec w = E::weight(p + ((at_half[0] + g) * TILE + t) * E::BYTES);
        const typename E::Vec w2 = GROUPED ? E::weight(p + ((at_half[1] + g) * TILE + t) * E::BYTES) : w;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[g][j] = E::dot(acc[g][j], j < 2 ? w : w2, value[j]);
      }
    }
    for (int g = 0; g < N; g++)
      for (int j = 0; j < 4; j++) {
        float* o = out + g * out_stride + (c * 4 + j) * VL;
        store(o, madd(E::as_float(acc[g][j]), splat(factor[at_half[j / 2] + g]), load<VF>(o) * fade[g]));
      }
  }
}

// out[g] = out[g] * fade[g] + factor[g] * (p[g] . v), n queries, keys t0 to t1 (even) of the tile. p [n, TILE] packed by the
// engine; out [n][chunks * 4 * VL] in the order of accumulators, see unpermute(). GROUPED: p [groups][n, TILE] and factor
// [groups][n], of each `channels` channels.
template <class R, bool GROUPED>
void accumulate(RowPointers rows, Ahead ahead, int64_t at, const char* p, int n, int D, int t0, int t1, const float* factor,
                const float* fade, float* out, int channels) {
  using E = typename R::Engine;
  const int64_t stride = chunks<E>(D) * 4 * VL;
  for (int g = 0; g < n; g += 4, ahead.bytes = 0) {
    const auto kernel = n - g >= 4   ? accumulate_n<R, 4, GROUPED>
                        : n - g == 3 ? accumulate_n<R, 3, GROUPED>
                        : n - g == 2 ? accumulate_n<R, 2, GROUPED>
                                     : accumulate_n<R, 1, GROUPED>;
    kernel(rows, ahead, at, p + g * TILE * E::BYTES, D, t0, t1, factor + g, fade + g, out + g * stride, stride, {n, channels});
  }
}

// Accumulators [chunks * 4 * VL] -> channels out [D].
template <class R>
void unpermute(const float* acc, int D, float* out) {
  using E = typename R::Engine;
  for (int c = 0; c < chunks<E>(D); c++)
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < VL; i++) {
        int d = j * VL + i;
        if (E::STEP == 2)
          d = R::BYTE_LANES ? 16 * (i / 4) + 8 * (j / 2) + 4 * (j % 2) + i % 4 : 32 * (j / 2) + 8 * (i / 4) + 4 * (j % 2) + i % 4;
        if (c * E::CHUNK + d < D) out[c * E::CHUNK + d] = acc[(c * 4 + j) * VL + i];
      }
}

struct KeyOps {
  int (*bytes)(int D);  // of a prepared query
  float (*prepare)(const float*, int, char*);
  void (*score)(RowPointers, Ahead, int64_t, const char*, int, int, int, int, float*);
  void (*score_groups)(RowPointers, Ahead, int64_t, const char*, int, int, int, int, const float*, int, float*);  // or null
};
struct ValueOps {
  int (*floats)(int D);  // of one query's accumulators
  float (*pack)(const float*, int, void*);
  int bytes;  // of a packed weight
  void (*accumulate)(RowPointers, Ahead, int64_t, const char*, int, int, int, int, const float*, const float*, float*, int);
  void (*accumulate_groups)(RowPointers, Ahead, int64_t, const char*, int, int, int, int, const float*, const float*, float*,
                            int);  // or null
  void (*unpermute)(const float*, int, float*);
};

template <class R>
constexpr KeyOps key_ops() {
  using E = typename R::Engine;
  KeyOps ops{[](int D) { return chunks<E>(D) * E::CHUNK * E::BYTES; }, prepare<R>, score<R>, nullptr};
  if constexpr (R::GROUPS) ops.score_groups = score_groups<R>;
  return ops;
}
template <class R>
constexpr ValueOps value_ops() {
  using E = typename R::Engine;
  ValueOps ops{[](int D) { return chunks<E>(D) * 4 * VL; }, E::pack, E::BYTES, accumulate<R, false>, nullptr, unpermute<R>};
  if constexpr (R::GROUPS) ops.accumulate_groups = accumulate<R, true>;
  return ops;
}

// Calls f with the reader of a plane's codes; false if there is none, then its rows are first dequantized.
template <class F>
bool with_reader(const Plane& p, Code dtype, F&& f) {
#if defined(QKV_AVX512)
  if (dtype != Code::F32) {  // what a pair engine represents as well as the compute dtype does
    if (p.code == Code::I8) return f(PairI8{}), true;
    if (p.code == Code::I4 && in_words(p.code, p.D)) return f(PairPacked<4>{}), true;
    if (p.code == Code::I3 && in_words(p.code, p.D)) return f(PairPacked<3>{}), true;
    if (p.code == Code::I2 && in_words(p.code, p.D)) return f(PairPacked<2>{}), true;
    if (dtype == Code::BF16) {
      if (p.code == Code::BF16) return f(PairBF16{}), true;
      if (p.code == Code::E4M3) return f(PairE4M3{}), true;
      if (p.code == Code::E5M2) return f(PairE5M2{}), true;
    }
  }
#endif
  switch (p.code) {
    case Code::F32: return f(ReadF32{}), true;
    case Code::BF16: return f(ReadBF16{}), true;
    case Code::F16: return f(ReadF16{}), true;
    case Code::E4M3: return f(ReadE4M3{}), true;
    case Code::E5M2: return f(ReadE5M2{}), true;
    case Code::I8: return f(ReadI8{}), true;
    default: return false;
  }
}

// Calls f with the reader of dequantized rows.
template <class F>
void with_rows(Code dtype, F&& f) {
#if defined(QKV_AVX512)
  if (dtype == Code::BF16) return f(PairBF16{});
#endif
  f(ReadF32{});
}

}  // namespace
}  // namespace qkv
