// Rows of the model as floats and back, and their rotation; a thread's scratch memory.
#pragma once
#include <vector>

#include "args.h"
#include "vec.h"

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

}  // namespace
}  // namespace qkv
