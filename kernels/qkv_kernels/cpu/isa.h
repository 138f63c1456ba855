// The three instruction sets that the kernels are compiled for: their names, what each consists of, and which one this machine
// runs. Every condition on an instruction set in these sources uses a name from this file; build.py holds the compiler's flags.
//
//   avx512    16 floats, 32 registers. Needs all the extensions named below (Cooper Lake, Sapphire Rapids, Zen 4 and later).
//             bfloat16 and float16 compute multiply pairs of 16-bit numbers, for integer codes as integers (vpdpwssd) and for
//             bfloat16 and fp8 as bfloat16 (vdpbf16ps); packed codes are unpacked in registers, fp8 codes are looked up in a
//             table, and in decoding the scales of groups of channels are applied to sums of products instead of elements.
//   avx2      8 floats, 16 registers (AVX2, FMA, F16C). It runs every format and dtype and stores the same bytes, but it has one
//             way to compute: codes are widened to float32 and multiplied there. So bfloat16 compute
//             saves memory traffic but no arithmetic, packed codes and scales of groups of channels take a pass over the rows
//             of a tile before the product, and fp8 is converted by arithmetic. The 256-bit dot products of some later machines
//             (AVX-VNNI) are not used. A machine with AVX-512 that lacks one of the extensions below gets this set too.
//   portable  4 floats: any machine, in the compiler's generic vectors and for the baseline of its architecture.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VBMI__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define QKV_AVX512
#define QKV_ISA avx512
#define VL 16  // floats of a vector
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QKV_AVX2
#define QKV_ISA avx2
#define VL 8
#else
#define QKV_ISA portable
#define VL 4  // what every machine passes in registers
#endif

// The function `name` of the instruction set that this file is compiled for: QKV_OF_ISA(kernels) is avx2_kernels, say.
#define QKV_OF_ISA(name) QKV_JOIN(QKV_ISA, name)
#define QKV_JOIN(isa, name) QKV_JOIN_EXPANDED(isa, name)
#define QKV_JOIN_EXPANDED(isa, name) isa##_##name

namespace qkv {
namespace {

#if defined(QKV_AVX512) || defined(__aarch64__)
constexpr int REGISTERS = 32;  // vectors that the processor can name
#else
constexpr int REGISTERS = 16;
#endif

// The best instruction set of this machine that was compiled in.
inline const char* best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512bf16"))
    return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return "avx2";
#endif
  return "portable";
}

}  // namespace
}  // namespace qkv
