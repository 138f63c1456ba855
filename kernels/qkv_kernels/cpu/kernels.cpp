// The attention kernels of one instruction set: compiled once for each, see build.py for the flags.
#include "append.h"
#include "args.h"
#include "decode.h"
#include "extend.h"
#include "isa.h"

namespace qkv {

const Kernels* QKV_OF_ISA(kernels)() {
  static const Kernels kernels = {append, complete, decode, merge, extend};
  return &kernels;
}

}  // namespace qkv
