// The operators of the model frame: checks, outputs, threads. The arithmetic is in frame_kernels.cpp.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "frame_args.h"

namespace qkv {
namespace {

const FrameKernels* frame_of(c10::string_view isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512_frame();
  if (isa == "avx2") return avx2_frame();
#endif
  TORCH_CHECK(isa == "portable", "no kernels for instruction set '", isa, "'");
  return portable_frame();
}

constexpr int64_t FEW = 32;             // rows up to here: NARROW outputs per task, for an even split over the threads
constexpr int64_t MANY = 48;            // rows from here on: packing pays
constexpr int64_t NARROW = 16;          // outputs
constexpr int64_t ROWS_PER_THREAD = 8;  // of row-wise work: less is not worth waking a thread for

void check(const at::Tensor& t, const at::Tensor& x, int64_t dim, const char* name) {
  TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.dim() == dim, name, " must be a contiguous CPU tensor of ", dim,
              " dimensions");
  TORCH_CHECK(t.scalar_type() == x.scalar_type(), name, " is ", t.scalar_type(), " but x is ", x.scalar_type());
}

bool is_bf16(const at::Tensor& x) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "the frame runs float32 and bfloat16, not ", type);
  return type == at::kBFloat16;
}

void check_rows(const at::Tensor& x, const at::Tensor& weight, const char* name) {
  check(x, x, 2, "x");
  check(weight, x, 1, name);
  TORCH_CHECK(weight.size(0) == x.size(1), name, " has ", weight.size(0), " elements, x has rows of ", x.size(1));
}

void check_projection(const at::Tensor& x, const at::Tensor& w, const char* name) {
  check(x, x, 2, "x");
  check(w, x, 2, name);
  TORCH_CHECK(w.size(1) == x.size(1), name, " takes ", w.size(1), " inputs, x has ", x.size(1));
}

struct Panel {  // one of several weights applied to the same rows
  Linear call;
  int64_t N, first_task;
};

// Cuts the outputs of all panels into tasks: up to `wide` outputs, for one of `down` parts of the rows. Tasks that share weights
// follow each other. A thread makes a worker() for its run of tasks and calls it with the panel's call, the first output, the
// number of outputs, the part, and whether the weights are others than those of its last task.
template <class Worker>
void each_task(std::vector<Panel>& panels, int64_t wide, int64_t down, const Worker& worker) {
  int64_t tasks = 0;
  for (auto& p : panels) {
    p.first_task = tasks;
    tasks += (p.N + wide - 1) / wide * down;
  }
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    auto work = worker();
    size_t p = 0;
    for (int64_t task = begin; task < end; task++) {
      while (p + 1 < panels.size() && task >= panels[p + 1].first_task) p++;
      const int64_t i = task - panels[p].first_task, n0 = i / down * wide;
      work(panels[p].call, n0, std::min(wide, panels[p].N - n0), i % down, task == begin || i % down == 0);
    }
  });
}

// run() for many rows: x is packed once, a panel of weights by the thread that takes its first block of rows.
void run_packed(const FrameKernels* frame, std::vector<Panel>& panels, int64_t T) {
  const Linear& any = panels[0].call;
  const int64_t count = words(any), height = frame->height, outputs = any.up ? frame->width : 2 * frame->width;
  const int64_t blocks = (T + height - 1) / height, each = TALL / height, down = (blocks + each - 1) / each;
  at::Tensor packed = at::empty({blocks, count, height}, at::kInt);
  auto* x = static_cast<uint32_t*>(packed.mutable_data_ptr());
  const auto rows = [&](int64_t block) { return std::min(height, T - block * height); };
  at::parallel_for(0, blocks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) frame->pack_rows(any, b * height, rows(b), x + b * count * height);
  });
  each_task(panels, outputs, down, [&] {
    return [&, w = std::vector<uint32_t>(2 * frame->width * count)](const Linear& call, int64_t n0, int64_t n, int64_t part,
                                                                    bool other_weights) mutable {
      if (other_weights) frame->pack_weights(call, n0, n, w.data());
      for (int64_t b = part * each; b < std::min(blocks, (part + 1) * each); b++)
        frame->block(call, x + b * count * height, w.data(), n0, n, b * height, rows(b));
    };
  });
}

// All outputs of all panels for all T rows. alike: a row's result does not depend on T.
void run(const FrameKernels* frame, std::vector<Panel>& panels, int64_t T, bool alike) {
  if (T >= MANY && !alike) return run_packed(frame, panels, T);
  each_task(panels, T <= FEW ? NARROW : WIDE, (T + TALL - 1) / TALL, [&] {
    return [&](const Linear& call, int64_t n0, int64_t n, int64_t part, bool) {
      frame->linear(call, n0, n, part * TALL, std::min(TALL, T - part * TALL));
    };
  });
}

void run(const FrameKernels* frame, const Norm& call, int64_t T) {
  at::parallel_for(0, T, ROWS_PER_THREAD, [&](int64_t begin, int64_t end) { frame->norm(call, begin, end); });
}

// x [T, K], weights [N_i, K], biases [N_i] or none -> [T, sum of N_i]. alike: a row's result does not depend, to the bit, on
// the rows beside it; slower for many.
at::Tensor linear(const at::Tensor& x, at::TensorList weights, at::TensorList biases, bool alike, c10::string_view isa) {
  TORCH_CHECK(biases.empty() || biases.size() == weights.size(), "as many biases as weights, or none");
  int64_t width = 0;
  for (size_t i = 0; i < weights.size(); i++) {
    check_projection(x, weights[i], "weight");
    if (!biases.empty()) {
      check(biases[i], x, 1, "bias");
      TORCH_CHECK(biases[i].size(0) == weights[i].size(0), "bias has ", biases[i].size(0), " elements");
    }
    width += weights[i].size(0);
  }
  auto out = at::empty({x.size(0), width}, x.options());
  auto* y = static_cast<char*>(out.mutable_data_ptr());
  std::vector<Panel> panels;
  for (size_t i = 0; i < weights.size(); i++) {
    const auto& w = weights[i];
    const void* bias = biases.empty() ? nullptr : biases[i].const_data_ptr();
    const Linear call{.bf16 = is_bf16(x),
                      .x = x.const_data_ptr(),
                      .w = w.const_data_ptr(),
                      .bias = bias,
                      .y = y,
                      .K = x.size(1),
                      .stride = width};
    panels.push_back({call, w.size(0), 0});
    y += w.size(0) * w.element_size();
  }
  run(frame_of(isa), panels, x.size(0), alike);
  return out;
}

// activation(x gate^T) * (x up^T): x [T, K], gate and up [N, K] -> [T, N]; alike: as in linear
at::Tensor gated_linear(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up, int64_t activation, bool alike,
                        c10::string_view isa) {
  check_projection(x, gate, "gate");
  check_projection(x, up, "up");
  TORCH_CHECK(gate.size(0) == up.size(0), "gate and up must have as many outputs");
  TORCH_CHECK(activation >= SILU && activation <= GELU, "activation ", activation, " is not known");
  auto out = at::empty({x.size(0), gate.size(0)}, x.options());
  const Linear call{.bf16 = is_bf16(x),
                    .x = x.const_data_ptr(),
                    .w = gate.const_data_ptr(),
                    .up = up.const_data_ptr(),
                    .y = out.mutable_data_ptr(),
                    .K = x.size(1),
                    .stride = gate.size(0),
                    .activation = static_cast<Activation>(activation)};
  std::vector<Panel> panels{{call, gate.size(0), 0}};
  run(frame_of(isa), panels, x.size(0), alike);
  return out;
}

// x / rms(x) * (weight + offset), by rows: x [T, K], weight [K] -> [T, K]
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, double offset, c10::string_view isa) {
  check_rows(x, weight, "weight");
  auto out = at::empty_like(x);
  const Norm call{.bf16 = is_bf16(x),
                  .x = const_cast<void*>(x.const_data_ptr()),  // written only when something is added
                  .weight = weight.const_data_ptr(),
                  .y = out.mutable_data_ptr(),
                  .K = x.size(1),
                  .eps = float(eps),
                  .offset = float(offset)};
  run(frame_of(isa), call, x.size(0));
  return out;
}

// residual += scale * x, in place; returns rms_norm(residual)
at::Tensor add_rms_norm(at::Tensor& residual, const at::Tensor& x, double scale, const at::Tensor& weight, double eps,
                        double offset, c10::string_view isa) {
  check_rows(x, weight, "weight");
  check(residual, x, 2, "residual");
  TORCH_CHECK(residual.sizes() == x.sizes(), "residual and x must be of one shape");
  auto out = at::empty_like(x);
  const Norm call{.bf16 = is_bf16(x),
                  .x = residual.mutable_data_ptr(),
                  .add = x.const_data_ptr(),
                  .weight = weight.const_data_ptr(),
                  .y = out.mutable_data_ptr(),
                  .K = x.size(1),
                  .scale = float(scale),
                  .eps = float(eps),
                  .offset = float(offset)};
  run(frame_of(isa), call, x.size(0));
  return out;
}

// Per head of q and k within qkv [T, (query_heads + 2 kv_heads) D], in place: RMS norm where weights [D] are given, then
// RoPE by cos and sin [T, turned <= D], whose second half belongs to the second half of the elements. v stays as it is.
void norm_rope(at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t query_heads, int64_t kv_heads,
               const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm, double eps, double offset,
               c10::string_view isa) {
  check(qkv, qkv, 2, "qkv");
  check(cos, qkv, 2, "cos");
  check(sin, qkv, 2, "sin");
  const int64_t heads = query_heads + 2 * kv_heads, D = qkv.size(1) / heads, turned = cos.size(1);
  TORCH_CHECK(D * heads == qkv.size(1), "qkv has ", qkv.size(1), " columns for ", heads, " heads");
  TORCH_CHECK(turned <= D && turned % 2 == 0, "RoPE of ", turned, " of ", D, " elements");
  TORCH_CHECK(cos.sizes() == sin.sizes() && cos.size(0) == qkv.size(0), "cos and sin must have a row per row of qkv");
  for (const auto& w : {q_norm, k_norm})
    if (w) {
      check(*w, qkv, 1, "norm weight");
      TORCH_CHECK(w->size(0) == D, "norm weight has ", w->size(0), " elements for a head of ", D);
    }
  const Rope call{.bf16 = is_bf16(qkv),
                  .qkv = qkv.mutable_data_ptr(),
                  .cos = cos.const_data_ptr(),
                  .sin = sin.const_data_ptr(),
                  .q_weight = q_norm ? q_norm->const_data_ptr() : nullptr,
                  .k_weight = k_norm ? k_norm->const_data_ptr() : nullptr,
                  .heads = heads,
                  .query_heads = query_heads,
                  .turning_heads = query_heads + kv_heads,
                  .D = D,
                  .turned = turned,
                  .eps = float(eps),
                  .offset = float(offset)};
  const FrameKernels* frame = frame_of(isa);
  at::parallel_for(0, qkv.size(0), ROWS_PER_THREAD, [&](int64_t begin, int64_t end) { frame->rope(call, begin, end); });
}

}  // namespace
}  // namespace qkv

TORCH_LIBRARY_FRAGMENT(qkv_cpu, m) {
  m.def("linear(Tensor x, Tensor[] weights, Tensor[] biases, bool alike, str isa) -> Tensor");
  m.def("gated_linear(Tensor x, Tensor gate, Tensor up, int activation, bool alike, str isa) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset, str isa) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) residual, Tensor x, float scale, Tensor weight, float eps, float offset, str isa) -> Tensor");
  m.def(
      "norm_rope(Tensor(a!) qkv, Tensor cos, Tensor sin, int query_heads, int kv_heads, Tensor? q_norm, Tensor? k_norm, "
      "float eps, float offset, str isa) -> ()");
}

TORCH_LIBRARY_IMPL(qkv_cpu, CPU, m) {
  m.impl("linear", &qkv::linear);
  m.impl("gated_linear", &qkv::gated_linear);
  m.impl("rms_norm", &qkv::rms_norm);
  m.impl("add_rms_norm", &qkv::add_rms_norm);
  m.impl("norm_rope", &qkv::norm_rope);
}
