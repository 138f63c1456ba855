// What Python tells these kernels by position or by number. Python keeps the same lists (cpu/__init__.py, cpu/frame.py), and a
// test compares them with protocol(), so that neither side can be reordered alone.
#pragma once
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "args.h"
#include "frame_args.h"

namespace qkv {

// The tensors of K or V as `planes` lists them, and the numbers of its format as `formats` lists them: first of K, then of V.
enum PlaneTensor { CODES, SCALES, ZEROS, HEAD_SCALE, CHANNEL_SCALE, STATIC_ZERO, TAIL, SINK, PLANE_TENSORS };
enum FormatNumber { SCALE_KIND, ZERO_KIND, GROUP_SIZE, BITS, ROTATE, FORMAT_NUMBERS };

// Names in the order of their numbers.
template <class Number>
std::vector<std::string> in_order(std::initializer_list<std::pair<Number, const char*>> names) {
  std::vector<std::string> list(names.size());
  for (auto [number, name] : names) list.at(number) = name;
  return list;
}

// The list called `what`, in this side's order and under Python's names; empty if there is none.
inline std::vector<std::string> protocol(const std::string& what) {
  if (what == "planes")
    return in_order<PlaneTensor>({{CODES, "codes"},
                                  {SCALES, "scale"},
                                  {ZEROS, "zero"},
                                  {HEAD_SCALE, "head_scale"},
                                  {CHANNEL_SCALE, "channel_scale"},
                                  {STATIC_ZERO, "static_zero"},
                                  {TAIL, "tail"},
                                  {SINK, "sink"}});
  if (what == "formats")
    return in_order<FormatNumber>(
        {{SCALE_KIND, "scale"}, {ZERO_KIND, "zero"}, {GROUP_SIZE, "group"}, {BITS, "bits"}, {ROTATE, "rotate"}});
  if (what == "scales")
    return in_order<Scale>({{UNSCALED, "none"},
                            {TENSOR, "tensor"},
                            {HEAD, "head"},
                            {CHANNEL, "channel"},
                            {TOKEN, "token"},
                            {GROUP, "token_group"},
                            {BLOCK_CHANNEL, "block_channel"}});
  if (what == "zeros") return in_order<Zero>({{NO_ZERO, "none"}, {CODE_ZERO, "code"}, {FLOAT_ZERO, "float"}});
  if (what == "activations") return in_order<Activation>({{SILU, "silu"}, {GELU_TANH, "gelu_pytorch_tanh"}, {GELU, "gelu"}});
  return {};
}

}  // namespace qkv
