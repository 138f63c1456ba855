// What the kernels take: plain data, no torch. One Call describes one layer's head range and one step.
//
// Legend: T rows · R requests · H kv heads of the range · G query heads per kv head · D head dim · B block size.
#pragma once
#include <cstdint>

namespace qkv {

enum Code : int64_t { F32, BF16, F16, E4M3, E5M2, I8, I4, I3, I2 };  // of a pool's codes; the first three also of q, k, v
static_assert(I3 == I4 + 1 && I2 == I4 + 2, "the number of bits is told from the code");
// Who shares a scale. From TOKEN on, scales lie in the pool; before it, they are parameters of the quantizer.
enum Scale : int64_t { UNSCALED, TENSOR, HEAD, CHANNEL, TOKEN, GROUP, BLOCK_CHANNEL };
enum Zero : int64_t { NO_ZERO, CODE_ZERO, FLOAT_ZERO };  // (code - zero) * scale | code * scale + zero

constexpr int TILE = 64;    // keys scored together; tiles are counted from position 0
constexpr int CHUNK = 512;  // keys of one unit of work, counted from position 0: never depends on threads or batch
constexpr int MAX_G = 32;   // G at most

struct RawRows {  // [slots, H, rows, D] in the dtype of q, innermost stride 1; no data: none. Strides in bytes.
  char* data;
  int64_t slot, head, row;
  int rows;
  char* at(int64_t s, int h, int i) const { return data + s * slot + h * head + i * row; }
};

struct Plane {  // K or V in the pool. Strides in bytes.
  Code code;
  Scale scale;
  Zero zero;
  bool half_scale;  // scales and zeros in the pool are float16, else float32
  bool rotate;      // codes are of rotated rows: see reference/hadamard.py
  int group, D;
  char* codes;
  int64_t block, head, token;
  char *scales, *zeros;
  int64_t s_block, s_head, s_token;
  const float *head_scale, *channel_scale, *static_zero;  // [H], [H, D], [H, D], or null
  RawRows tail, sink;  // of formats that encode whole blocks: a ring of each request's last rows; the first rows of sequences
  bool raw;            // the plane stands for a segment of raw rows, which raw_row() in pages.h finds

  int element() const { return code == F32 ? 4 : code == BF16 || code == F16 ? 2 : 1; }
  int bits() const { return code >= I4 ? 4 - int(code - I4) : 8 * element(); }
  int row_bytes() const { return D * bits() / 8; }
};

struct Rows {  // [T, heads, D] of the model, innermost stride 1. Strides in bytes.
  char* data;
  int64_t row, head;
};

struct Call {
  Code dtype;  // of q, k, v, out
  Rows q, k, v, out;
  Plane K, V;
  int T, R, H, G, B;
  const int32_t* table;   // [R, M]
  int64_t table_stride;   // elements
  const int32_t* starts;  // [R + 1] row where each request begins
  const int64_t *slots, *positions;
  const int64_t *tail_slots, *sink_slots;  // [R], or null
  float scaling, softcap;                  // softcap 0: none
  int window;                              // 0: none
  const float* sink_logits;                // [H * G] or null
};

struct Segment {  // keys [first, last) of which K, and likewise V, is read as codes or as raw rows
  int first, last;
  bool k_raw, v_raw;
};
constexpr int MAX_SEGMENTS = 5;  // sinks and recent blocks of K and of V, and what is between them

// The attention of one row to keys [first, last), which lie in one chunk and one segment, for kv heads [h0, h1). Raw rows belong
// to one kv head, so a unit that reads some has one.
struct Unit {
  int row, request, first, last, h0, h1;
  bool k_raw, v_raw;
  float* part;  // [(h1 - h0) * G][2 + Dv]: maximum, sum, unnormalised output; base 2
};

// Query rows [r0, r1) of one request and one kv head, attending to all their keys; rows of one block where formats have tails.
struct Block {
  int r0, r1, request, h, count;
  Segment segments[MAX_SEGMENTS];  // count of them
};

struct Kernels {
  void (*append)(const Call&, int row0, int row1);
  void (*complete)(const Call&, int request, int block, int h);
  void (*decode)(const Call&, const Unit&);
  void (*merge)(const Call&, int row, int h, const float* const* parts, int64_t count);
  void (*extend)(const Call&, const Block&);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace qkv
