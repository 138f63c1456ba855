// Rows of the model as floats and back, and their rotation; a thread's scratch memory.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "args.h"
#include "vec.h"

namespace qkv {
namespace {

// A thread's scratch memory, kept between calls. Pieces stay where they are until the next reset(), which makes room for all of
// them in one: only the first calls of a thread allocate.
class Arena {
 public:
  void reset() {
    if (chunks_.size() > 1) {
      size_t all = 0;
      for (const Chunk& chunk : chunks_) all += chunk.size;
      chunks_.clear();
      add(all);
    }
    used_ = 0;
  }
  // Room for n elements on lines of their own, with whatever was left there.
  template <class T>
  T* take(size_t n) {
    const size_t size = (n * sizeof(T) + LINE - 1) / LINE * LINE;
    if (chunks_.empty() || used_ + size > chunks_.back().size) add(size), used_ = 0;
    T* piece = (T*)(chunks_.back().begin + used_);
    used_ += size;
    return piece;
  }

 private:
  static constexpr size_t LINE = 64;
  struct Chunk {
    std::unique_ptr<char[]> memory;
    char* begin;  // the first whole line of it
    size_t size;
  };
  void add(size_t size) {
    std::unique_ptr<char[]> memory(new char[size + LINE]);
    char* begin = memory.get() + (LINE - (uintptr_t)memory.get() % LINE) % LINE;
    chunks_.push_back({std::move(memory), begin, size});
  }
  std::vector<Chunk> chunks_;
  size_t used_ = 0;  // of the last chunk
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
    const VF partner = shuffle(v, v, [](int lane) { return lane ^ STEP; });
    return butterflies<2 * STEP>(partner + (VF)((VI)v ^ (minus & INT32_MIN)));
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
