"""Device functions that know formats: addressing pages, widening codes, placing scales, encoding.

A tile is [keys, lanes]: `lanes` channels of one stream (see spec.PlaneSpec). What uses inline assembly has a plain twin, which
the interpreter runs.
"""

import triton
import triton.language as tl

MIN_SCALE = tl.constexpr(2.0**-24)  # as in the reference codec
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting rounds |x| < 2^22 to the nearest even integer


@triton.jit
def row_at(
    page, head, within, PAGE: tl.constexpr, HEAD: tl.constexpr, ROW: tl.constexpr, FAR: tl.constexpr
):  # fmt: skip
    """Where rows begin in a plane of these strides. Pages are int64; heads are int32, which takes fewer registers, unless they
    lie FAR apart."""
    if FAR:
        head = head.to(tl.int64)
    return page * PAGE + (head * HEAD + within * ROW)


@triton.jit
def load_rows(base, row, keep, MASKED: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """[keys, LANES] elements at base + row[:, None] + channel; 0 where not kept or past WIDTH."""
    return load_tile(base + row[:, None] + tl.arange(0, LANES)[None, :], keep, MASKED, WIDTH, LANES)


@triton.jit
def load_tile(at, keep, MASKED: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Elements at pointers [keys, LANES]; 0 where not kept or past WIDTH."""
    c = tl.arange(0, LANES)
    if MASKED:
        if WIDTH == LANES:
            x = tl.load(at, mask=keep[:, None], other=0)
        else:
            x = tl.load(at, mask=keep[:, None] & (c < WIDTH)[None, :], other=0)
    else:
        if WIDTH == LANES:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(c < WIDTH)[None, :], other=0)
    return x


@triton.jit
def load_codes(base, row, keep, MASKED: tl.constexpr, S: tl.constexpr):
    """What rows store, [keys, lanes]: as it is, or the unsigned codes of 2 or 3 bits of all channels, one per byte."""
    if S.kind == "int2" or S.kind == "int3":
        x = load_bit_plane(base, row, keep, MASKED, 2, S)
        if S.kind == "int3":
            x = x | (load_bit_plane(base + S.D // 4, row, keep, MASKED, 1, S) << 2)
    else:
        x = load_rows(base, row, keep, MASKED, S.width, S.lanes)
    return x


@triton.jit
def load_bit_plane(base, row, keep, MASKED: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr):
    """[keys, lanes] uint8: byte j holds BITS each of channels j, j + D/n ..., n = 8/BITS (see reference/packing.py)."""
    BYTES: tl.constexpr = S.D * BITS // 8
    c = tl.arange(0, S.lanes)
    x = load_tile(base + row[:, None] + (c % BYTES)[None, :], keep, MASKED, S.width, S.lanes)
    return (x >> ((c // BYTES * BITS) & 7).to(tl.uint8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def load_keys(base, row, keep, other, MASKED: tl.constexpr):
    """[keys] float32: one number per key."""
    if MASKED:
        x = tl.load(base + row, mask=keep, other=other)
    else:
        x = tl.load(base + row)
    return x.to(tl.float32)


@triton.jit
def load_static(base, head, stream, otherwise, ZERO: tl.constexpr, S: tl.constexpr):
    """[lanes] float32 static scales (or ZERO points) of one stream; `otherwise` past the last channel."""
    c = tl.arange(0, S.lanes)
    if ZERO:
        at = base + head * S.static_zeros[0] + (stream * S.width + c) * S.static_zeros[1]
    else:
        at = base + head * S.static_scales[0] + (stream * S.width + c) * S.static_scales[1]
    return tl.load(at, mask=c < S.width, other=otherwise)


@triton.jit
def widen(codes, stream: tl.constexpr, S: tl.constexpr, MAT: tl.constexpr, PURE: tl.constexpr):
    """Codes of one stream as numbers of type MAT, in units of S.code_unit. Exact."""
    if S.kind == "raw":
        x = codes
    elif S.convert == "plain":
        x = widen_plain(codes, stream, S)
    else:
        x = widen_packed(codes, stream, S, PURE)
    return x.to(MAT)


@triton.jit
def widen_plain(codes, stream: tl.constexpr, S: tl.constexpr):
    """For the interpreter and for AMD."""
    if S.kind == "int8":
        x = codes.to(tl.float16)
    elif S.kind == "int4":
        if stream == 0:
            nibble = codes & 15
        else:
            nibble = codes >> 4
        x = nibble.to(tl.float16) - 8.0
    elif S.kind == "int3" or S.kind == "int2":
        x = codes.to(tl.float16) - S.code_offset
    else:
        bits = codes.to(tl.uint16)
        if S.kind == "e5m2":  # the upper half of a float16
            half = bits << 8
        else:  # one exponent bit less: the same number with the exponent bias of float16, times 2^-8
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        x = half.to(tl.float16, bitcast=True)
    return x


@triton.jit
def widen_packed(codes, stream: tl.constexpr, S: tl.constexpr, PURE: tl.constexpr):
    """The same for NVIDIA: four codes of a register at a time, without conversion instructions where bytes can be placed.

    Pure operations are moved before the layout conversion for the matrix unit, which is right for K: codes travel through
    shared memory, not float16. V's tile enters the product transposed, where single bytes would be loaded one by one: not PURE
    keeps its conversion with the load.
    """
    if stream == 0:
        x = tl.inline_asm_elementwise(S.ptx_low, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=PURE, pack=4)
    else:
        x = tl.inline_asm_elementwise(S.ptx_high, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=PURE, pack=4)
    return x


@triton.jit
def spread(x, S: tl.constexpr):
    """[keys, groups] -> [keys, lanes]: every channel gets its group's number."""
    keys: tl.constexpr = x.shape[0]
    groups: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], (keys, groups, S.group)), (keys, groups * S.group))


@triton.jit
def values(
    stored,
    scale,
    zero,
    scale_row,
    zero_row,
    keep,
    stream: tl.constexpr,
    S: tl.constexpr,
    MAT,
    PURE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stored codes [keys, lanes] -> numbers of one stream for the matrix unit. Scales are applied here only where groups of
    channels or channels of a block have their own; all others are placed outside the product. scale_row, zero_row and keep are
    of keys, or of pages for scales of blocks."""
    x = widen(stored, stream, S, MAT, PURE)
    KEYS: tl.constexpr = stored.shape[0]
    if S.scale == "group" or S.scale == "block":
        s = per_element(scale, scale_row, keep, stream, S.code_unit, S, MAT, KEYS, MASKED)
        if S.zero == "code":
            x = (x - per_element(zero, zero_row, keep, stream, 1.0, S, MAT, KEYS, MASKED)) * s
        elif S.zero == "float":
            x = x * s + per_element(zero, zero_row, keep, stream, 1.0, S, MAT, KEYS, MASKED)
        else:
            x = x * s
        x = x.to(MAT)
    return x


@triton.jit
def per_element(
    plane, row, keep, stream: tl.constexpr, UNIT: tl.constexpr, S: tl.constexpr, MAT, KEYS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Scales or zeros of groups or of blocks, times UNIT, for every element of a tile [KEYS, lanes]."""
    if S.scale == "group":
        x = load_rows(plane + stream * S.groups, row, keep, MASKED, S.groups, S.lanes // S.group)
        x = spread((x.to(tl.float32) * UNIT).to(MAT), S)
    else:
        x = load_rows(plane + stream * S.width, row, keep, MASKED, S.width, S.lanes)
        PAGES: tl.constexpr = x.shape[0]
        x = (x.to(tl.float32) * UNIT).to(MAT)
        x = tl.reshape(tl.broadcast_to(x[:, None, :], (PAGES, KEYS // PAGES, S.lanes)), (KEYS, S.lanes))
    return x


# Encoding. The same arithmetic as the reference codec, step by step, so that codes are equal. Launched without fused
# multiply-add: it would round differently.


@triton.jit
def round_even(x):
    return (x + MAGIC) - MAGIC


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def float8_bits(x, S: tl.constexpr):
    """float32 within the format's range -> its fp8 bits (uint8), rounded to nearest even, subnormals included."""
    DROP: tl.constexpr = 20 if S.kind == "e4m3" else 21  # mantissa bits of float32 that go
    BIAS: tl.constexpr = 7 if S.kind == "e4m3" else 15
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + ((1 << (DROP - 1)) - 1) + ((magnitude >> DROP) & 1)
    normal = (rounded >> DROP) - ((127 - BIAS) << (23 - DROP))
    # Below the smallest normal number the quantum is 2^(1 - BIAS - mantissa bits): a float whose last bit is that quantum.
    QUANTUM: tl.constexpr = 1 - BIAS - (23 - DROP)
    shift = tl.full(x.shape, (QUANTUM + 23 + 127) << 23, tl.int32)
    small = (tl.abs(x) + shift.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - shift
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    return (code | sign).to(tl.uint8)


@triton.jit
def encode_numbers(x, s, z, S: tl.constexpr):
    """x [rows, lanes] with scale and zero that broadcast against it -> codes as float32 (fp8: not yet rounded)."""
    if S.zero == "float":
        x = x - z
    if S.scale != "none":
        x = tl.div_rn(x, s)
    if S.zero == "code":
        x = x + z
    x = clamp(x, S.code_min, S.code_max)
    if S.kind != "e4m3" and S.kind != "e5m2":
        x = round_even(x)
    return x


@triton.jit
def dynamic_scale(low, high, S: tl.constexpr, SCALE: tl.constexpr):
    """Scale and zero, as stored (type SCALE), from the smallest and the largest element of a row or group."""
    if S.zero == "none":
        s = tl.div_rn(tl.maximum(tl.abs(low), tl.abs(high)), S.code_max)
        z = s
    elif S.zero == "code":
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
        s = clamp(tl.div_rn(high - low, S.code_max - S.code_min), MIN_SCALE, S.scale_max)
        exact = clamp(S.code_min - tl.div_rn(low, s.to(SCALE).to(tl.float32)), S.code_min, S.code_max)
        z = round_even(exact)
        z = tl.where(z == 0, exact * 0.0, z)  # keeps the sign of zero, as rounding by IEEE does
    else:
        z = low - tl.div_rn(high - low, S.code_max - S.code_min) * S.code_min
        z = clamp(z, -S.scale_max, S.scale_max).to(SCALE).to(tl.float32)
        s = tl.maximum(tl.div_rn(high - z, S.code_max), tl.div_rn(low - z, S.code_min))
    return clamp(s, MIN_SCALE, S.scale_max).to(SCALE), z.to(SCALE)
