// Compiled once per instruction set; see build.py for the flags.
#include "append.h"
#include "extend.h"

#define JOIN(a, b) a##b
#define NAME(isa) JOIN(isa, _kernels)
#define TEXT(a) #a
#define QUOTED(a) TEXT(a)

namespace qkv {
const Kernels* NAME(QKV_ISA)() {
  static const Kernels kernels = {QUOTED(QKV_ISA), append, complete, decode, merge, extend};
  return &kernels;
}
}  // namespace qkv
