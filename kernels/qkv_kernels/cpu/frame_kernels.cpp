// The frame's arithmetic, for the instruction set this file is compiled for; see build.py for the flags.
//
// Weights are read where they lie, row-major [N, K], as torch.nn.Linear keeps them. Every output is a dot product of two
// contiguous rows, so a product of few rows streams the weights once, in order, and needs no packed copy of them; for some
// rows a tile of ROWS x COLS dot products shares its loads. A dot product adds up in one fixed order, in float32, so a row's
// result depends neither on the other rows of the batch nor on the number of threads.
//
// Many rows repay packing a panel of weights on the fly: then a vector holds as many outputs, every element of x meets it as
// a broadcast, and no sums across lanes are left. Its order of adding up is another one.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "frame_args.h"
#include "isa.h"
#include "vec.h"

namespace qkv {
namespace {

constexpr int COLS = 4;                        // as many as sum4() takes
constexpr int ROWS = REGISTERS == 32 ? 6 : 2;  // with 32 registers 24 hold sums, 4 vectors of w and one of x
static_assert(TALL % ROWS == 0);

struct Bf16 {
  uint16_t bits;
};

// -- VL elements as floats -----------------------------------------------------------------------------------------------

INLINE VF get(const float* p) { return load<VF>(p); }
INLINE VF get(const Bf16* p) { return (VF)(__builtin_convertvector(load<V16>(p), VU) << 16); }
INLINE void put(float* p, VF x) { store(p, x); }
INLINE void put(Bf16* p, VF x) {
#if defined(QKV_AVX512)
  store(p, _mm512_cvtneps_pbh(x));
#else
  const VU u = (VU)x, rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  store(p, __builtin_convertvector(x == x ? rounded : rounded * 0u + 0x7fc0u, V16));
#endif
}

template <class T>
INLINE VF get_part(const T* p, int n) {
  T whole[VL] = {};
  memcpy(whole, p, n * sizeof(T));
  return get(whole);
}
template <class T>
INLINE void put_part(T* p, VF x, int n) {
  T whole[VL];
  put(whole, x);
  memcpy(p, whole, n * sizeof(T));
}

// Calls f(offset, elements) for each vector of a row of n elements, and apart for what is left of it.
template <class Whole, class Part>
INLINE void over(int64_t n, const Whole& whole, const Part& part) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) whole(i);
  if (i < n) part(i, int(n - i));
}

// -- dot products --------------------------------------------------------------------------------------------------------

// One step along K: WIDTH elements of a row of x times those of a row of w, added to VL partial sums.
template <class T>
struct Step;

template <>
struct Step<float> {
  static constexpr int WIDTH = VL;
  static FORCE VF mac(VF acc, VF a, VF b) { return madd(a, b, acc); }
};

template <>
struct Step<Bf16> {
  static constexpr int WIDTH = 2 * VL;
#if defined(QKV_AVX512)
  static FORCE VF mac(VF acc, VF a, VF b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#else
  static FORCE VF mac(VF acc, VF a, VF b) {
    acc = madd((VF)((VU)a << 16), (VF)((VU)b << 16), acc);
    return madd((VF)((VU)a & 0xffff0000u), (VF)((VU)b & 0xffff0000u), acc);
  }
#endif
};

template <class T>
INLINE VF raw_part(const T* p, int64_t n) {
  VF v = {};
  memcpy(&v, p, n * sizeof(T));
  return v;
}

// sums[r * WIDE + c] = x[r] . w[c] for R rows of x and COLS rows of w. FETCH: bring in the weights after next, in the pass
// that reads them from memory.
template <class T, int R, bool FETCH>
void tile(const T* x, const T* const (&w)[COLS], int64_t K, float* sums) {
  using S = Step<T>;
  VF acc[R][COLS] = {};
  int64_t k = 0;
  for (; k + S::WIDTH <= K; k += S::WIDTH) {
    VF b[COLS];
    for (int c = 0; c < COLS; c++) {
      b[c] = load<VF>(w[c] + k);
      if (FETCH) __builtin_prefetch(w[c] + 2 * COLS * K + k);
    }
    for (int r = 0; r < R; r++) {
      const VF a = load<VF>(x + r * K + k);
      for (int c = 0; c < COLS; c++) acc[r][c] = S::mac(acc[r][c], a, b[c]);
    }
  }
  if (k < K)
    for (int r = 0; r < R; r++) {
      const VF a = raw_part(x + r * K + k, K - k);
      for (int c = 0; c < COLS; c++) acc[r][c] = S::mac(acc[r][c], a, raw_part(w[c] + k, K - k));
    }
  for (int r = 0; r < R; r++) sum4(acc[r], sums + r * WIDE);
}

template <class T, int R = ROWS>
void tile_of(int rows, bool fetch, const T* x, const T* const (&w)[COLS], int64_t K, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<T, R - 1>(rows, fetch, x, w, K, sums);
  }
  fetch ? tile<T, R, true>(x, w, K, sums) : tile<T, R, false>(x, w, K, sums);
}

// sums[r * WIDE + i] = x[r] . w[i] for `rows` <= ROWS rows of x and n <= WIDE rows of w
template <class T>
void products(const T* x, int rows, const T* w, int64_t n, int64_t K, bool fetch, float* sums) {
  for (int64_t i = 0; i < n; i += COLS) {
    const T* at[COLS];
    for (int64_t c = 0; c < COLS; c++) at[c] = w + std::min(i + c, n - 1) * K;
    tile_of<T>(rows, fetch, x, at, K, sums + i);
  }
}

// -- projections ---------------------------------------------------------------------------------------------------------

INLINE VF sigmoid(VF x) { return 1.f / (1.f + exp2v(vmin(x * -1.4426950409f, splat(127.f)))); }

INLINE VF activate(VF x, Activation kind) {
  if (kind == SILU) return x * sigmoid(x);
  if (kind == GELU_TANH) return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));  // 2 sqrt(2 / pi); tanh as a sigmoid
  VF y;
  for (int i = 0; i < VL; i++) y[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f));
  return y;
}

template <class T>
void write(T* y, const float* sums, const T* bias, int64_t n) {
  over(
      n, [&](int64_t i) { put(y + i, bias ? get(sums + i) + get(bias + i) : get(sums + i)); },
      [&](int64_t i, int part) {
        const VF s = get_part(sums + i, part);
        put_part(y + i, bias ? s + get_part(bias + i, part) : s, part);
      });
}

template <class T>
void linear_typed(const Linear& c, int64_t n0, int64_t n, int64_t t0, int64_t rows) {
  alignas(64) float sums[ROWS * WIDE], ups[ROWS * WIDE];
  const T *x = static_cast<const T*>(c.x), *w = static_cast<const T*>(c.w) + n0 * c.K;
  const T* up = c.up ? static_cast<const T*>(c.up) + n0 * c.K : nullptr;
  const T* bias = c.bias ? static_cast<const T*>(c.bias) + n0 : nullptr;
  T* y = static_cast<T*>(c.y) + n0;
  for (int64_t t = t0; t < t0 + rows; t += ROWS) {
    const int r = std::min<int64_t>(ROWS, t0 + rows - t);
    products(x + t * c.K, r, w, n, c.K, t == t0, sums);
    if (up) {
      products(x + t * c.K, r, up, n, c.K, t == t0, ups);
      for (int i = 0; i < r; i++)
        for (int64_t j = i * WIDE; j < i * WIDE + n; j += VL) put(sums + j, activate(get(sums + j), c.activation) * get(ups + j));
    }
    for (int i = 0; i < r; i++) write(y + (t + i) * c.stride, sums + i * WIDE, bias, n);
  }
}

void linear(const Linear& c, int64_t n0, int64_t n, int64_t t0, int64_t rows) {
  c.bf16 ? linear_typed<Bf16>(c, n0, n, t0, rows) : linear_typed<float>(c, n0, n, t0, rows);
}

// -- many rows -----------------------------------------------------------------------------------------------------------

constexpr int HEIGHT = REGISTERS == 32 ? 12 : 4;  // times two vectors of sums; two of weights and one of x
static_assert(TALL % HEIGHT == 0 && HEIGHT % std::min(VL, HEIGHT) == 0);

// Calls put(i, word i) for the words of a row of K elements, beginning with `from`.
template <class T, class Put>
INLINE void over_words(const T* row, int64_t K, int64_t from, const Put& put) {
  constexpr int64_t each = 4 / sizeof(T);
  int64_t i = from;
  for (; (i + 1) * each <= K; i++) put(i, load<uint32_t>(row + i * each));
  if (i * each < K) {
    uint32_t last = 0;
    memcpy(&last, row + i * each, sizeof(T));
    put(i, last);
  }
}

// [words][HEIGHT]; the last row stands in for rows that are not there, whose results nobody takes.
template <class T>
void pack_rows_typed(const Linear& c, int64_t t0, int64_t rows, uint32_t* packed) {
  const int64_t whole = c.K * int64_t(sizeof(T)) / 4 / VL * VL;
  const T* x = static_cast<const T*>(c.x) + t0 * c.K;
  const auto row = [&](int64_t r) { return x + std::min(r, rows - 1) * c.K; };
  for (int r0 = 0; r0 < HEIGHT; r0 += VL) {
    constexpr int N = std::min(VL, HEIGHT);
    for (int64_t k = 0; k < whole; k += VL) {
      VU tile[VL] = {};
      for (int r = 0; r < N; r++) tile[r] = load<VU>(row(r0 + r) + k * (4 / sizeof(T)));
      transpose(tile);
      for (int i = 0; i < VL; i++) memcpy(packed + (k + i) * HEIGHT + r0, &tile[i], 4 * N);
    }
    for (int r = r0; r < r0 + N; r++) over_words(row(r), c.K, whole, [&](int64_t i, uint32_t w) { packed[i * HEIGHT + r] = w; });
  }
}

// [words][2][VL]: two times VL outputs, or VL of w and the same VL of up. The last row stands in for rows that are not there.
template <class T>
void pack_weights_typed(const Linear& c, int64_t n0, int64_t n, uint32_t* packed) {
  const int64_t whole = c.K * int64_t(sizeof(T)) / 4 / VL * VL;
  for (int v = 0; v < 2; v++) {
    const T* w = static_cast<const T*>(v && c.up ? c.up : c.w);
    const T* row[VL];
    for (int i = 0; i < VL; i++) row[i] = w + (n0 + std::min<int64_t>(n - 1, c.up ? i : v * VL + i)) * c.K;
    uint32_t* out = packed + v * VL;
    for (int64_t k = 0; k < whole; k += VL) {
      VU tile[VL];
      for (int i = 0; i < VL; i++) tile[i] = load<VU>(row[i] + k * (4 / sizeof(T)));
      transpose(tile);
      for (int i = 0; i < VL; i++) store(out + (k + i) * 2 * VL, tile[i]);
    }
    for (int i = 0; i < VL; i++) over_words(row[i], c.K, whole, [&](int64_t k, uint32_t x) { out[k * 2 * VL + i] = x; });
  }
}

template <class T>
void block_typed(const Linear& c, const uint32_t* x, const uint32_t* w, int64_t n0, int64_t n, int64_t t0, int64_t rows) {
  using S = Step<T>;
  VF acc[HEIGHT][2] = {};
  for (int64_t i = words(c); i; i--, x += HEIGHT, w += 2 * VL) {
    const VF b0 = load<VF>(w), b1 = load<VF>(w + VL);
#pragma GCC unroll 12
    for (int r = 0; r < HEIGHT; r++) {
      const VF a = (VF)(x[r] + VU{});
      acc[r][0] = S::mac(acc[r][0], a, b0), acc[r][1] = S::mac(acc[r][1], a, b1);
    }
  }
  const T* bias = c.bias ? static_cast<const T*>(c.bias) + n0 : nullptr;
  T* y = static_cast<T*>(c.y) + t0 * c.stride + n0;
  if (rows == HEIGHT && n == (c.up ? VL : 2 * VL) && !bias) {  // straight from the registers
#pragma GCC unroll 12
    for (int r = 0; r < HEIGHT; r++, y += c.stride) {
      if (c.up)
        put(y, activate(acc[r][0], c.activation) * acc[r][1]);
      else
        put(y, acc[r][0]), put(y + VL, acc[r][1]);
    }
    return;
  }
  alignas(64) float sums[2 * VL];
  for (int r = 0; r < rows; r++, y += c.stride) {
    if (c.up) acc[r][0] = activate(acc[r][0], c.activation) * acc[r][1];
    store(sums, acc[r][0]), store(sums + VL, acc[r][1]);
    write(y, sums, bias, n);
  }
}

void pack_rows(const Linear& c, int64_t t0, int64_t rows, uint32_t* packed) {
  c.bf16 ? pack_rows_typed<Bf16>(c, t0, rows, packed) : pack_rows_typed<float>(c, t0, rows, packed);
}

void pack_weights(const Linear& c, int64_t n0, int64_t n, uint32_t* packed) {
  c.bf16 ? pack_weights_typed<Bf16>(c, n0, n, packed) : pack_weights_typed<float>(c, n0, n, packed);
}

void block(const Linear& c, const uint32_t* x, const uint32_t* w, int64_t n0, int64_t n, int64_t t0, int64_t rows) {
  c.bf16 ? block_typed<Bf16>(c, x, w, n0, n, t0, rows) : block_typed<float>(c, x, w, n0, n, t0, rows);
}

// -- row by row ----------------------------------------------------------------------------------------------------------

// y = x / rms(x) * (weight + offset)
template <class X, class W, class Y>
void normalize(const X* x, const W* weight, float offset, float eps, int64_t n, Y* y) {
  VF squares = {};
  over(
      n, [&](int64_t i) { squares = madd(get(x + i), get(x + i), squares); },
      [&](int64_t i, int part) { squares = madd(get_part(x + i, part), get_part(x + i, part), squares); });
  const float scale = 1.f / sqrtf(hsum(squares) / n + eps);
  over(
      n, [&](int64_t i) { put(y + i, get(x + i) * scale * (get(weight + i) + offset)); },
      [&](int64_t i, int part) { put_part(y + i, get_part(x + i, part) * scale * (get_part(weight + i, part) + offset), part); });
}

template <class T>
void norm_typed(const Norm& c, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    T* x = static_cast<T*>(c.x) + t * c.K;
    if (c.add) {
      const T* add = static_cast<const T*>(c.add) + t * c.K;
      over(
          c.K, [&](int64_t i) { put(x + i, get(x + i) + get(add + i) * c.scale); },
          [&](int64_t i, int part) { put_part(x + i, get_part(x + i, part) + get_part(add + i, part) * c.scale, part); });
    }
    normalize(x, static_cast<const T*>(c.weight), c.offset, c.eps, c.K, static_cast<T*>(c.y) + t * c.K);
  }
}

void norm(const Norm& c, int64_t begin, int64_t end) {
  c.bf16 ? norm_typed<Bf16>(c, begin, end) : norm_typed<float>(c, begin, end);
}

template <class T>
void rope_typed(const Rope& c, int64_t begin, int64_t end) {
  const int64_t half = c.turned / 2;
  std::vector<float> buffer(c.D + 2 * c.turned);
  float *head = buffer.data(), *cos = head + c.D, *sin = cos + c.turned;
  const auto copy = [](float* to, const T* from, int64_t n) {
    over(
        n, [&](int64_t i) { put(to + i, get(from + i)); },
        [&](int64_t i, int part) { put_part(to + i, get_part(from + i, part), part); });
  };
  for (int64_t t = begin; t < end; t++) {
    copy(cos, static_cast<const T*>(c.cos) + t * c.turned, c.turned);
    copy(sin, static_cast<const T*>(c.sin) + t * c.turned, c.turned);
    for (int64_t h = 0; h < c.turning_heads; h++) {
      T* x = static_cast<T*>(c.qkv) + (t * c.heads + h) * c.D;
      const auto* weight = static_cast<const T*>(h < c.query_heads ? c.q_weight : c.k_weight);
      weight ? normalize(x, weight, c.offset, c.eps, c.D, head) : copy(head, x, c.D);
      for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i + half] + a * sin[i + half];
      }
      write(x, head, static_cast<const T*>(nullptr), c.D);
    }
  }
}

void rope(const Rope& c, int64_t begin, int64_t end) {
  c.bf16 ? rope_typed<Bf16>(c, begin, end) : rope_typed<float>(c, begin, end);
}

}  // namespace

const FrameKernels* QKV_OF_ISA(frame)() {
  static const FrameKernels kernels = {HEIGHT, VL, linear, pack_rows, pack_weights, block, norm, rope};
  return &kernels;
}

}  // namespace qkv
