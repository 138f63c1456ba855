// The operator qkv_cpu::attend: checks, then splits a step over torch's threads. The arithmetic is in kernels.cpp.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "args.h"
#include "isa.h"
#include "protocol.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

using at::Tensor;
using namespace qkv;

const Kernels* kernels(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512_kernels();
  if (isa == "avx2") return avx2_kernels();
#endif
  TORCH_CHECK(isa == "portable", "no kernels for instruction set '", isa, "'");
  return portable_kernels();
}

Code code_of(at::ScalarType type, int64_t bits = 4) {
  switch (type) {
    case at::kFloat: return F32;
    case at::kBFloat16: return BF16;
    case at::kHalf: return F16;
    case at::kFloat8_e4m3fn: return E4M3;
    case at::kFloat8_e5m2: return E5M2;
    case at::kChar: return I8;
    case at::kByte: return Code(I4 + 4 - bits);
    default: TORCH_CHECK(false, "the cpu kernels have no dtype ", type);
  }
}

Rows rows_of(const Tensor& x) {  // [T, heads, D]
  TORCH_CHECK(x.dim() == 3 && (x.stride(2) == 1 || x.size(2) == 1), "q, k, v must be [T, heads, D] with unit stride of D");
  return {(char*)x.data_ptr(), x.stride(0) * x.element_size(), x.stride(1) * x.element_size()};
}

const float* floats_of(const Tensor& x) {
  TORCH_CHECK(!x.defined() || x.numel() == 0 || (x.scalar_type() == at::kFloat && x.is_contiguous()),
              "statics must be contiguous float32");
  return x.numel() ? x.const_data_ptr<float>() : nullptr;
}

RawRows raw_of(const Tensor& x, int H, int D, at::ScalarType dtype) {
  if (!x.numel()) return {};
  TORCH_CHECK(x.dim() == 4 && x.size(1) == H && x.size(3) == D && x.stride(3) == 1,
              "tails and sinks must be [slots, H, rows, D] with unit stride of D");
  TORCH_CHECK(x.scalar_type() == dtype, "tails and sinks must have the dtype of q, ", dtype, ", not ", x.scalar_type());
  const int64_t size = x.element_size();
  return {(char*)x.data_ptr(), x.stride(0) * size, x.stride(1) * size, x.stride(2) * size, int(x.size(2))};
}

// planes: codes, scale and zero of the pool; head_scale [H], channel_scale [H, D], static_zero [H, D]; empty where absent.
Plane plane_of(at::TensorList planes, at::IntArrayRef format, int D, at::ScalarType dtype) {
  const Tensor &codes = planes[CODES], &scale = planes[SCALES], &zero = planes[ZEROS];
  TORCH_CHECK(codes.dim() == 4 && codes.stride(3) == 1, "codes must be [N, H, B, Dp] with unit stride of Dp");
  Plane p{};
  p.code = code_of(codes.scalar_type(), format[BITS]);
  p.scale = Scale(format[SCALE_KIND]), p.zero = Zero(format[ZERO_KIND]), p.group = int(format[GROUP_SIZE]);
  p.rotate = format[ROTATE], p.D = D;
  TORCH_CHECK(codes.size(3) * codes.element_size() == p.row_bytes(), "codes of ", codes.size(3), " elements for head dim ", D);
  p.codes = (char*)codes.data_ptr();
  p.block = codes.stride(0) * codes.element_size();
  p.head = codes.stride(1) * codes.element_size();
  p.token = codes.stride(2) * codes.element_size();
  if (scale.numel()) {
    const auto type = scale.scalar_type();
    TORCH_CHECK(type == at::kHalf || type == at::kFloat, "scales must be float16 or float32, not ", type);
    TORCH_CHECK(!zero.numel() || (zero.strides() == scale.strides() && zero.scalar_type() == type),
                "zeros must lie like their scales");
    TORCH_CHECK((scale.dim() == 3 && p.scale == TOKEN) || scale.stride(-1) == 1, "scales of one row or block must be neighbours");
    p.half_scale = type == at::kHalf;
    p.scales = (char*)scale.data_ptr();
    p.zeros = zero.numel() ? (char*)zero.data_ptr() : nullptr;
    p.s_block = scale.stride(0) * scale.element_size();
    p.s_head = scale.stride(1) * scale.element_size();
    p.s_token = scale.stride(2) * scale.element_size();
  }
  TORCH_CHECK((p.scale < TOKEN) == !p.scales, "a pool scale goes with token, token_group and block_channel formats only");
  p.head_scale = floats_of(planes[HEAD_SCALE]), p.channel_scale = floats_of(planes[CHANNEL_SCALE]);
  p.static_zero = floats_of(planes[STATIC_ZERO]);
  p.tail = raw_of(planes[TAIL], int(codes.size(1)), D, dtype), p.sink = raw_of(planes[SINK], int(codes.size(1)), D, dtype);
  TORCH_CHECK(p.tail.rows % codes.size(2) == 0, "a tail of ", p.tail.rows, " rows is not whole blocks of ", codes.size(2));
  TORCH_CHECK(p.scale != BLOCK_CHANNEL || p.tail.data, "block_channel formats need a tail");
  return p;
}

// Calls work(i) for i < n; each thread takes the next i when it has finished one. Which thread does what changes no result.
template <class F>
void share(int64_t n, F work) {
  const int64_t threads = std::min<int64_t>(n, at::get_num_threads());
  if (threads <= 1) {
    for (int64_t i = 0; i < n; i++) work(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
  });
}

const int64_t* slots_of(const std::optional<Tensor>& slots, const Call& c, bool wanted) {
  if (!wanted || !c.R) return nullptr;
  TORCH_CHECK(slots && slots->scalar_type() == at::kLong && slots->is_contiguous() && slots->size(0) == c.R,
              "the formats keep raw rows: tail_slots and sink_slots must be contiguous int64 [R]");
  return slots->const_data_ptr<int64_t>();
}

// What a query at position p0, or queries p0 to p1 of one block, see: their keys cut where K or V turns from codes to raw rows.
int segments(const Call& c, int p0, int p1, Segment* out) {
  const int first = c.window ? std::max(0, p0 - c.window + 1) : 0, last = p1 + 1;
  const auto recent = [&](const Plane& p) {  // from here on raw
    return p.tail.data ? std::max(0, p0 / c.B - (p.tail.rows / c.B - 1)) * c.B : last;
  };
  const int k_recent = recent(c.K), v_recent = recent(c.V);
  int cuts[] = {first, c.K.sink.rows, c.V.sink.rows, k_recent, v_recent, last}, count = 0;
  for (int& cut : cuts) cut = std::clamp(cut, first, last);
  std::sort(std::begin(cuts), std::end(cuts));
  for (int i = 0; i < MAX_SEGMENTS; i++) {
    const int at = cuts[i];
    const Segment s{at, cuts[i + 1], at < c.K.sink.rows || at >= k_recent, at < c.V.sink.rows || at >= v_recent};
    if (s.first == s.last) continue;
    if (count && out[count - 1].k_raw == s.k_raw && out[count - 1].v_raw == s.v_raw)
      out[count - 1].last = s.last;
    else
      out[count++] = s;
  }
  return count;
}

// Raw rows of a call into their rings or, with `first`, into the sinks.
void keep_raw(const Call& c, bool first) {
  const auto keep = [&](const RawRows& to, const Rows& rows, const int64_t* slots, int D, int r) {
    const int row = c.starts[r], n = c.starts[r + 1] - row, size = D * (c.dtype == F32 ? 4 : 2);
    const int64_t start = n ? c.positions[row] : 0;
    const int64_t from = first ? 0 : std::max(0, n - to.rows), until = first ? std::clamp<int64_t>(to.rows - start, 0, n) : n;
    for (int64_t i = from; to.data && i < until; i++)
      for (int h = 0; h < c.H; h++)
        memcpy(to.at(slots[r], h, int((start + i) % to.rows)), rows.data + (row + i) * rows.row + h * rows.head, size);
  };
  at::parallel_for(0, c.R, 8, [&](int64_t a, int64_t b) {
    for (int r = int(a); r < b; r++) {
      keep(first ? c.K.sink : c.K.tail, c.k, first ? c.sink_slots : c.tail_slots, c.K.D, r);
      keep(first ? c.V.sink : c.V.tail, c.v, first ? c.sink_slots : c.tail_slots, c.V.D, r);
    }
  });
}

void encode_rows(const Call& c, const Kernels* isa) {
  if (!c.K.tail.data || !c.V.tail.data)
    at::parallel_for(0, c.T, std::max<int64_t>(1, 16384 / (c.H * (c.K.D + c.V.D))),
                     [&](int64_t a, int64_t b) { isa->append(c, int(a), int(b)); });
  if (!c.K.tail.data && !c.V.tail.data) return;
  std::vector<std::pair<int, int>> full;  // request, block: of those that this call completes
  for (int r = 0; r < c.R; r++)
    if (const int n = c.starts[r + 1] - c.starts[r])
      for (int64_t start = c.positions[c.starts[r]], block = start / c.B; (block + 1) * c.B <= start + n; block++)
        full.push_back({r, int(block)});
  share(full.size() * c.H, [&](int64_t i) { isa->complete(c, full[i / c.H].first, full[i / c.H].second, int(i % c.H)); });
}

constexpr int ROWS_TIMES_G = 96;  // query vectors that share a dequantized tile

struct Pending {  // units of one row and group of kv heads, whose parts are still to be merged
  int row, h0, h1, first_unit, units;
};

void attend_rows(const Call& c, const Kernels* isa, const std::vector<std::pair<int, int>>& rows) {
  const int heads_each = [&] {  // few rows: split the kv heads too, until every thread has something to do
    int64_t units = 0;
    for (auto [row, request] : rows) units += c.positions[row] / CHUNK + 1;
    int each = c.H;
    while (each > 1 && units * ((c.H + each - 1) / each) < 4 * at::get_num_threads()) each = (each + 1) / 2;
    return each;
  }();
  if (rows.empty()) return;
  std::vector<Unit> units;
  std::vector<Pending> pending;
  for (auto [row, request] : rows) {
    Segment seen[MAX_SEGMENTS];
    const int position = int(c.positions[row]), count = segments(c, position, position, seen);
    for (int h = 0; h < c.H; h += heads_each) {
      const int h1 = std::min(c.H, h + heads_each), unit = int(units.size());
      for (int i = 0; i < count; i++) {
        const Segment& s = seen[i];
        for (int at = s.first; at < s.last; at = at / CHUNK * CHUNK + CHUNK)
          for (int u = h, step = s.k_raw || s.v_raw ? 1 : h1 - h; u < h1; u += step)  // each head has its own raw rows
            units.push_back(
                {row, request, at, std::min(s.last, at / CHUNK * CHUNK + CHUNK), u, u + step, s.k_raw, s.v_raw, nullptr});
      }
      pending.push_back({row, h, h1, unit, int(units.size()) - unit});
    }
  }
  const int64_t one = int64_t(c.G) * (2 + c.V.D);  // part of one kv head
  int64_t heads = 0;
  for (const Unit& u : units) heads += u.h1 - u.h0;
  Tensor parts = at::empty({heads * one}, at::kFloat);
  float* part = parts.data_ptr<float>();
  for (Unit& u : units) u.part = part, part += (u.h1 - u.h0) * one;
  share(units.size(), [&](int64_t i) { isa->decode(c, units[i]); });
  const auto merge = [&](int64_t i) {
    const Pending& p = pending[i];
    std::vector<const float*> list(p.units);
    for (int h = p.h0; h < p.h1; h++) {
      int64_t count = 0;
      for (const Unit* u = &units[p.first_unit]; u < &units[p.first_unit] + p.units; u++)
        if (u->h0 <= h && h < u->h1) list[count++] = u->part + (h - u->h0) * one;
      isa->merge(c, p.row, h, list.data(), count);
    }
  };
  if (pending.size() * heads_each * c.G * c.V.D < 16384)
    for (size_t i = 0; i < pending.size(); i++) merge(i);
  else
    share(pending.size(), merge);
}

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, at::TensorList planes, const Tensor& block_table,
              const Tensor& query_start, const Tensor& slots, const Tensor& positions, const std::optional<Tensor>& tail_slots,
              const std::optional<Tensor>& sink_slots, const std::optional<Tensor>& sink_logits, at::IntArrayRef formats,
              double scaling, int64_t window, double softcap, bool store, bool deterministic, c10::string_view isa_name) {
  const Kernels* isa = kernels(std::string(isa_name));
  TORCH_CHECK(planes.size() == 2 * PLANE_TENSORS && formats.size() == 2 * FORMAT_NUMBERS, "attend wants ", 2 * PLANE_TENSORS,
              " planes and ", 2 * FORMAT_NUMBERS, " format numbers");
  Call c{};
  c.dtype = code_of(q.scalar_type());
  TORCH_CHECK(c.dtype <= F16, "attend computes in float32, bfloat16 and float16, not ", q.scalar_type());
  const Tensor& codes = planes[CODES];
  c.T = int(q.size(0)), c.H = int(codes.size(1)), c.B = int(codes.size(2)), c.R = int(query_start.size(0)) - 1;
  TORCH_CHECK(c.H > 0 && q.size(1) % c.H == 0, q.size(1), " query heads on ", c.H, " kv heads");
  c.G = int(q.size(1)) / c.H;
  TORCH_CHECK(c.G <= MAX_G, c.G, " query heads per kv head; at most ", MAX_G);
  c.K = plane_of(planes.slice(0, PLANE_TENSORS), formats.slice(0, FORMAT_NUMBERS), int(q.size(2)), q.scalar_type());
  c.V = plane_of(planes.slice(PLANE_TENSORS), formats.slice(FORMAT_NUMBERS), int(v.size(2)), q.scalar_type());
  Tensor out = at::empty({c.T, q.size(1), c.V.D}, q.options());
  c.q = rows_of(q), c.k = rows_of(k), c.v = rows_of(v), c.out = rows_of(out);
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "q, k and v must have one dtype");
  TORCH_CHECK(block_table.scalar_type() == at::kInt && query_start.scalar_type() == at::kInt &&
                  slots.scalar_type() == at::kLong && positions.scalar_type() == at::kLong,
              "block_table and query_start are int32, slots and positions int64");
  TORCH_CHECK(c.R == 0 || (block_table.size(0) == c.R && block_table.stride(1) == 1), "block_table must be [R, M]");
  TORCH_CHECK(slots.size(0) == c.T && positions.size(0) == c.T && k.size(0) == c.T && v.size(0) == c.T, "rows disagree");
  const Tensor table = block_table, starts = query_start.contiguous(), where = slots.contiguous(),
               at_position = positions.contiguous();
  c.table = table.const_data_ptr<int32_t>(), c.table_stride = table.size(0) ? table.stride(0) : 0;
  c.slots = where.const_data_ptr<int64_t>(), c.positions = at_position.const_data_ptr<int64_t>();
  c.starts = starts.const_data_ptr<int32_t>();
  c.tail_slots = slots_of(tail_slots, c, c.K.tail.data || c.V.tail.data);
  c.sink_slots = slots_of(sink_slots, c, c.K.sink.data || c.V.sink.data);
  c.scaling = float(scaling), c.softcap = float(softcap), c.window = int(window);
  Tensor logits;
  if (sink_logits) logits = sink_logits->to(at::kFloat).contiguous(), c.sink_logits = logits.const_data_ptr<float>();
  TORCH_CHECK(!c.sink_logits || logits.numel() == q.size(1), "there must be one sink logit per query head");

  if (c.sink_slots) keep_raw(c, true);
  if (store) encode_rows(c, isa);
  const int32_t* start = c.starts;
  std::vector<std::pair<int, int>> rows;  // attended one by one
  std::vector<Block> blocks;
  int step = std::max(1, ROWS_TIMES_G / c.G);
  if (c.tail_slots) step = (c.B - 1) / std::max(1, c.B / step) + 1;  // rows of one block see the same blocks raw: cut it evenly
  for (int r = 0; r < c.R; r++) {
    const int n = start[r + 1] - start[r];
    if (n == 1 || deterministic)
      for (int row = start[r]; row < start[r + 1]; row++) rows.push_back({row, r});
    else
      for (int row = start[r], end; row < start[r + 1]; row = end) {
        const int position = int(c.positions[row]);
        end = std::min(row + step, start[r + 1]);
        if (c.tail_slots) end = std::min(end, row + c.B - position % c.B);
        Block block{row, end, r};
        block.count = segments(c, position, position + end - row - 1, block.segments);
        for (block.h = 0; block.h < c.H; block.h++) blocks.push_back(block);
      }
  }
  attend_rows(c, isa, rows);
  const int64_t last = int64_t(blocks.size()) - 1;  // later rows see more keys: begin with them
  share(last + 1, [&](int64_t i) { isa->extend(c, blocks[last - i]); });
  if (c.tail_slots) keep_raw(c, false);  // last: rows of this call read what it overwrites
  if (c.R == 0 || start[c.R] < c.T) out.slice(0, c.R ? start[c.R] : 0).zero_();
  return out;
}

// Ask for huge pages: a step reads pages all over the pool, and with 4 KB pages each costs a TLB miss.
void advise_huge(const Tensor& pool) {
#if defined(__linux__)
  constexpr uintptr_t HUGE = 2 << 20;
  const uintptr_t begin = ((uintptr_t)pool.data_ptr() + HUGE - 1) & ~(HUGE - 1);
  const uintptr_t end = ((uintptr_t)pool.data_ptr() + pool.nbytes()) & ~(HUGE - 1);
  if (end > begin) {
    madvise((void*)begin, end - begin, MADV_HUGEPAGE);
    madvise((void*)begin, end - begin, 25);  // MADV_COLLAPSE (Linux 6.1): now, not when the kernel finds time
  }
#endif
}

// How many threads share a loop of as many iterations as torch has threads.
int64_t threads() {
  std::atomic<int64_t> used{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) { used++; });
  return used;
}

}  // namespace

TORCH_LIBRARY(qkv_cpu, m) {
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor(a!)[] planes, Tensor block_table, Tensor query_start, Tensor slots, "
      "Tensor positions, Tensor? tail_slots, Tensor? sink_slots, Tensor? sink_logits, int[] formats, float scaling, int window, "
      "float softcap, bool store, bool deterministic, str isa) -> Tensor");
  m.def("advise_huge(Tensor pool) -> ()");
  m.def("best_isa() -> str", [] { return std::string(best_isa()); });
  m.def("protocol(str what) -> str[]", &protocol);
  m.def("max_queries_per_kv_head() -> int", [] { return int64_t(MAX_G); });
  m.def("threads() -> int", &threads);
}

TORCH_LIBRARY_IMPL(qkv_cpu, CPU, m) {
  m.impl("attend", &attend);
  m.impl("advise_huge", &advise_huge);
}
