// What the frame's kernels take: plain data, no torch. The frame is a decoder layer without its attention.
//
// Legend: T rows (tokens) · K inputs · N outputs of a projection · D head dim.
#pragma once
#include <cstdint>

namespace qkv {

enum Activation : int64_t { SILU, GELU_TANH, GELU };

constexpr int64_t TALL = 96;   // rows per task: a multiple of every tile's height
constexpr int64_t WIDE = 128;  // outputs per task at most: their weights stay in L2 while the rows pass

struct Linear {  // y[t, n] = x[t] . w[n] + bias[n], or, with `up`, activation(x[t] . w[n]) * (x[t] . up[n])
  bool bf16;
  const void *x, *w, *up, *bias;  // [T, K], [N, K], [N, K] or null, [N] or null
  void* y;
  int64_t K, stride;  // stride: elements between rows of y
  Activation activation;
};

inline int64_t words(const Linear& c) { return c.bf16 ? (c.K + 1) / 2 : c.K; }

struct Norm {  // y = x / rms(x) * (weight + offset); with `add`, first x += scale * add
  bool bf16;
  void* x;
  const void *add, *weight;  // [T, K] or null, [K]
  void* y;
  int64_t K;
  float scale, eps, offset;
};

struct Rope {  // of the first `normed` heads q and then k of qkv [T, heads, D]: RMS norm where there are weights, then RoPE
  bool bf16;
  void* qkv;
  const void *cos, *sin;            // [T, turned]
  const void *q_weight, *k_weight;  // [D] or null
  int64_t heads, query_heads, turning_heads, D, turned;
  float eps, offset;
};

struct FrameKernels {
  int64_t height, width;                                                           // rows and vectors-wide outputs of a block
  void (*linear)(const Linear&, int64_t n0, int64_t n, int64_t t0, int64_t rows);  // n <= WIDE
  // The same for many rows, from packed operands: words(K) words of 4 bytes per row, in blocks of `height` rows and 2 `width`
  // weight rows.
  void (*pack_rows)(const Linear&, int64_t t0, int64_t rows, uint32_t* packed);  // rows <= height
  void (*pack_weights)(const Linear&, int64_t n0, int64_t n, uint32_t* packed);  // n <= outputs(call)
  void (*block)(const Linear&, const uint32_t* x, const uint32_t* w, int64_t n0, int64_t n, int64_t t0, int64_t rows);
  void (*norm)(const Norm&, int64_t begin, int64_t end);  // rows
  void (*rope)(const Rope&, int64_t begin, int64_t end);
};

const FrameKernels* portable_frame();
const FrameKernels* avx2_frame();
const FrameKernels* avx512_frame();

}  // namespace qkv
