"""PTX that widens four stored codes, one register, to four float16, two registers.

Operands: $0, $1 the results (elements 0 and 1, 2 and 3), $2 the codes. A byte u placed below 0x64 is the float16 1024 + u, so
integers take one byte permutation and one subtraction per two codes, and no conversion instruction. tests/kernels/triton runs
every snippet over all codes in a small PTX interpreter. Does not know about: scales, layouts.
"""

_PLACE = "prmt.b32 $0, u, 0x64646464, 0x4140; prmt.b32 $1, u, 0x64646464, 0x4342;"
_SUBTRACT = "sub.rn.f16x2 $0, $0, m; sub.rn.f16x2 $1, $1, m;"

INT8 = f"{{ .reg .b32 u, m; mov.b32 m, 0x64806480; xor.b32 u, $2, 0x80808080; {_PLACE} {_SUBTRACT} }}"  # u = code + 128
INT4_LOW = f"{{ .reg .b32 u, m; mov.b32 m, 0x64086408; and.b32 u, $2, 0x0f0f0f0f; {_PLACE} {_SUBTRACT} }}"  # u = code + 8
INT4_HIGH = f"{{ .reg .b32 u, m; mov.b32 m, 0x64086408; shr.b32 u, $2, 4; and.b32 u, u, 0x0f0f0f0f; {_PLACE} {_SUBTRACT} }}"
UNSIGNED = "{{ .reg .b32 u, m; mov.b32 m, 0x64{0:02x}64{0:02x}; mov.b32 u, $2; {1} {2} }}"  # code + offset, one per byte
INT3, INT2 = UNSIGNED.format(4, _PLACE, _SUBTRACT), UNSIGNED.format(2, _PLACE, _SUBTRACT)
E5M2 = "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;"  # the upper byte of a float16
E4M3 = "{ .reg .b16 x, y; mov.b32 {x, y}, $2; cvt.rn.f16x2.e4m3x2 $0, x; cvt.rn.f16x2.e4m3x2 $1, y; }"  # sm_89 and newer
_SHIFT = "and.b32 s, {r}, 0x80008000; shr.b32 t, {r}, 1; and.b32 t, t, 0x3f803f80; or.b32 {r}, s, t;"
E4M3_BITS = f"{{ .reg .b32 s, t; {E5M2} {_SHIFT.format(r='$0')} {_SHIFT.format(r='$1')} }}"  # times 2^-8


def widen(kind: str, stream: int, native_fp8: bool) -> str:
    """The snippet for codes of a PlaneSpec's kind; stream 1 is the high nibbles."""
    if kind == "int4":
        return INT4_HIGH if stream else INT4_LOW
    return {"int8": INT8, "int3": INT3, "int2": INT2, "e5m2": E5M2, "e4m3": E4M3 if native_fp8 else E4M3_BITS}[kind]
