"""Encode and decode of every format that is affine or has a codebook. The definition that kernels are compared with.

A code q is a signed integer (or an fp8 number); its value is q * scale, (q - zero) * scale with zero="code", or
q * scale + zero with zero="float". Rules, each implied by the format:

    raw      no scale and at least 16 bits: the value itself
    static   scale and zero are given
    absmax   dynamic, zero="none":  scale = absmax / qmax,  q in [-qmax, qmax]
    minmax   dynamic, with a zero:  [min, max] onto all codes

With a codebook a code is the index of the entry nearest to (x - zero) / scale, the lower one of two that are equally near; absmax
and minmax put the largest magnitude, or both ends, onto the outermost entries.

Scales and zeros are rounded to `scale_dtype` first and codes are computed from them as stored, so that decoding uses
exactly what encoding used. All arithmetic is IEEE float32 (float64 for float64 input), rounding is half to even.
Rotated formats are rotated first; `dequantize` gives their rotated values, which is what attention works with, `decode`
rotates back. Does not know about: pools, which block a row belongs to, attention.
"""

import torch

from qkv_kernels.format import STATIC_SCALES, KVFormat
from qkv_kernels.reference.hadamard import hadamard
from qkv_kernels.reference.packing import multiple_of, pack, unpack

Encoded = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

MIN_SCALE = 2.0**-24  # smallest positive float16: constant and zero rows divide by this instead of by zero
_SMALLEST = {torch.float8_e4m3fn: 2.0**-9}  # positive numbers of types that do not reach MIN_SCALE
HUGE = 2.0**100  # far beyond what scales reach; sums of that many stay finite


def refusal(fmt: KVFormat, D: int) -> str | None:
    """None if the format can be stored at head dim D and, unless a quantizer reads it, this codec reads it; else the reason."""
    if fmt.reading == "quantizer":
        return None if D * fmt.bits % 8 == 0 else f"a row of {D} codes of {fmt.bits} bits does not fill whole bytes"
    if fmt.raw:
        return None if fmt.storage.is_floating_point else f"raw storage must be a float type, not {fmt.storage}"
    if fmt.group is not None and D % fmt.group:
        return f"head dim {D} is not a multiple of the scale group {fmt.group}"
    if fmt.bits < 8 and (D % multiple_of(fmt.bits) or fmt.storage != torch.uint8):
        needs = f"a head dim that is a multiple of {multiple_of(fmt.bits)} (got {D}) and uint8 storage (got {fmt.storage})"
        return f"{fmt.bits}-bit codes need {needs}"
    is_float = fmt.storage.is_floating_point
    if fmt.bits == 8 and not (is_float or fmt.storage == torch.int8):
        return f"8-bit codes are int8 or fp8, not {fmt.storage}"
    return "fp8 codes take no zero point" if is_float and fmt.zero != "none" else None


def encode(
    x: torch.Tensor,
    fmt: KVFormat,
    static_scale: torch.Tensor | None = None,
    static_zero: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> Encoded:
    """x [T, H, D] -> (data [T, H, Dp], scale, zero); scale and zero [T, H] or [T, H, D/group], None unless dynamic.

    Block-unit formats: x [n, B, H, D], n whole blocks; scale and zero [n, H, D] for "block_channel", else as above with
    [n, B] for [T]. static_scale, static_zero: [], [H] or [H, D], as the format says. table [entries] or [H, entries], of
    codebooks; static_scale [] is then the scale of the tensor, if the format has one. Row (block) i depends on x[i] only.
    """
    if fmt.raw:
        return x.to(fmt.storage), None, None
    x = x.to(_compute_dtype(x.dtype))
    if fmt.rotate:
        x = hadamard(x.clamp(-HUGE, HUGE))
    if fmt.reading == "codebook":
        assert table is not None
        unit = x if static_scale is None else x / static_scale.to(x.dtype)
        return look_up(x, fmt, table, *_fit(unit, fmt, table), static_scale)
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    if fmt.scale in STATIC_SCALES or fmt.scale == "none":
        scale = zero = None
        s, z = static_scale, static_zero
    else:
        scale, zero = s, z = _choose(x, fmt)
    if z is not None and fmt.zero == "float":
        x = x - _spread(z, fmt, x)
    if s is not None:
        x = x / _spread(s, fmt, x)
    if z is not None and fmt.zero == "code":
        x = x + _spread(z, fmt, x)
    qmin, qmax = code_range(fmt)
    if fmt.storage.is_floating_point:  # clamp first: the cast itself gives NaN or inf beyond the largest value
        return x.clamp(qmin, qmax).to(fmt.storage), scale, zero
    q = x.round().clamp(qmin, qmax)
    return (pack(q, fmt.bits) if fmt.bits < 8 else q.to(fmt.storage)), scale, zero


def look_up(
    x: torch.Tensor,
    fmt: KVFormat,
    table: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    tensor_scale: torch.Tensor | None = None,
) -> Encoded:
    """Codes of x [..., H, D] in a codebook format, with scale and zero as they are stored: for quantizers that choose these.

    x: rotated already where the format rotates. Where the scale is 0, codes are 0.
    """
    x = x if zero is None else x - _spread(zero, fmt, x)
    codes = nearest(x if scale is None else x / _step(scale, tensor_scale, fmt, x), table)
    return pack(codes.to(torch.int16) - 2 ** (fmt.bits - 1), fmt.bits), scale, zero


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """uint8 index of the entry of table (ascending, [entries] or [H, entries]) nearest to x [..., H, D]; the lower one of two."""
    middles = ((table[..., 1:] + table[..., :-1]) / 2).to(x.dtype)
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for middle in middles.unbind(-1):
        codes += x > (middle[:, None] if middle.dim() else middle)
    return codes


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] -> [...]: the sum of every row in one fixed order, so that it does not depend, to the bit, on the other rows."""
    while (n := x.shape[-1]) > 1:
        half = n // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = folded if n % 2 == 0 else torch.cat([folded, x[..., -1:]], -1)
    return x[..., 0]


def decode(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    fmt: KVFormat,
    dtype: torch.dtype,
    static_scale: torch.Tensor | None = None,
    static_zero: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """What encode() was given, as stored: dequantize(), rotated back if the format rotates. Same arguments."""
    if not fmt.rotate:
        return dequantize(data, scale, zero, fmt, dtype, static_scale, static_zero, table)
    return hadamard(dequantize(data, scale, zero, fmt, _compute_dtype(dtype), static_scale, static_zero, table)).to(dtype)


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    fmt: KVFormat,
    dtype: torch.dtype,
    static_scale: torch.Tensor | None = None,
    static_zero: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """data [..., Dp] with scale and zero [...] or [..., D/group] (None unless dynamic) -> values [..., D] in `dtype`.
    For "block_channel", data [..., B, H, Dp] with scale and zero [..., H, D].

    Statics broadcast: [H] or [H, D] for data [T, H, Dp], [H, 1] or [H, 1, D] for data [..., H, S, Dp]. The
    table is [entries], or likewise [H, entries] or [H, 1, entries].
    """
    if fmt.raw:
        return data.to(dtype)
    if fmt.reading == "codebook":
        assert table is not None
        x = _entries(table.to(_compute_dtype(dtype)), unpack(data, fmt.bits).long())
        x = x if scale is None else x.mul_(_step(scale, static_scale, fmt, x))
        return (x if zero is None else x.add_(_spread(zero, fmt, x))).to(dtype)
    x = _widen(data, fmt, _compute_dtype(dtype))
    s, z = (static_scale, static_zero) if scale is None else (scale, zero)
    if z is not None and fmt.zero == "code":
        x = x.sub_(_spread(z, fmt, x))
    if s is not None:
        x = x.mul_(_spread(s, fmt, x))
    if z is not None and fmt.zero == "float":
        x = x.add_(_spread(z, fmt, x))
    return x.to(dtype)


def code_range(fmt: KVFormat) -> tuple[float, float]:
    """Smallest and largest code. Symmetric integers leave out the lowest one: -x has the negated code of x."""
    if fmt.storage.is_floating_point:
        largest = torch.finfo(fmt.storage).max
        return -largest, largest
    largest = 2 ** (fmt.bits - 1) - 1
    return (-largest if fmt.zero == "none" else -largest - 1), largest


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _entries(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """table[code] for every code [..., D], in a new tensor; the table's leading dims broadcast to those of the codes."""
    if table.dim() == 1:
        return table[codes]
    return torch.gather(table.expand(*codes.shape[:-1], -1), -1, codes)


def _step(scale: torch.Tensor, tensor_scale: torch.Tensor | None, fmt: KVFormat, x: torch.Tensor) -> torch.Tensor:
    """What entries of a codebook are multiplied with, to broadcast against x [..., D]."""
    s = _spread(scale, fmt, x)
    return s if tensor_scale is None else s * tensor_scale.to(x.dtype)


def _choose(x: torch.Tensor, fmt: KVFormat, table: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Dynamic scale and zero of every row (group of channels, channel of a block), as stored. table: of a codebook."""
    if fmt.scale == "none":
        return None, None
    rows = x.unflatten(-1, (-1, fmt.group)) if fmt.group else x
    over = -3 if fmt.scale == "block_channel" else -1
    qmin, qmax = code_range(fmt)
    if fmt.zero == "none":
        return _stored_scale(rows.abs().amax(over) / qmax, fmt), None
    low, high = rows.aminmax(dim=over)
    if fmt.zero == "code":  # the range includes 0, so that the zero point is itself a code
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = _stored_scale((high - low) / (qmax - qmin), fmt)
        return scale, (qmin - low / scale).round().clamp(qmin, qmax).to(fmt.scale_dtype)
    zero = _stored_zero(low - (high - low) / (qmax - qmin) * qmin, fmt)
    # The scale reaches both ends from the zero as stored: rounding of the zero never clips.
    return _stored_scale(torch.maximum((high - zero) / qmax, (low - zero) / qmin), fmt), zero


def _fit(x: torch.Tensor, fmt: KVFormat, table: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The same for a codebook: the largest magnitude, or with a zero both ends, come onto the outermost entries."""
    if fmt.scale == "none":
        return None, None
    rows = x.unflatten(-1, (-1, fmt.group)) if fmt.group else x
    over = -3 if fmt.scale == "block_channel" else -1
    first, last = table[..., 0].to(x.dtype), table[..., -1].to(x.dtype)
    if table.dim() == 2 and fmt.scale != "token":  # [H] beside scales [..., H, groups or D]
        first, last = first[:, None], last[:, None]
    if fmt.zero == "none":
        return _stored_scale(rows.abs().amax(over) / torch.maximum(-first, last), fmt), None
    low, high = rows.aminmax(dim=over)
    scale = _stored_scale((high - low) / (last - first), fmt)
    return scale, _stored_zero(low - scale.to(x.dtype) * first, fmt)


def _stored_scale(scale: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    return scale.clamp(_SMALLEST.get(fmt.scale_dtype, MIN_SCALE), torch.finfo(fmt.scale_dtype).max).to(fmt.scale_dtype)


def _stored_zero(zero: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    largest = torch.finfo(fmt.scale_dtype).max
    return zero.clamp(-largest, largest).to(fmt.scale_dtype)


def _spread(s: torch.Tensor, fmt: KVFormat, x: torch.Tensor) -> torch.Tensor:
    """Scales or zeros shaped to broadcast against x [..., D], in x's dtype."""
    s = s.to(x.dtype)
    if fmt.scale == "token_group":
        assert fmt.group is not None
        return s.repeat_interleave(fmt.group, -1)
    if fmt.scale == "block_channel":
        return s.unsqueeze(-3)
    return s if fmt.scale in ("tensor", "channel") else s[..., None]


def _widen(data: torch.Tensor, fmt: KVFormat, dtype: torch.dtype) -> torch.Tensor:
    """Codes as numbers, in a new tensor."""
    if fmt.bits < 8:
        return unpack(data, fmt.bits).to(dtype).sub_(2 ** (fmt.bits - 1))
    if not fmt.storage.is_floating_point:
        return data.to(dtype)
    # A table of the 256 values: same numbers as .to(), several times faster on a CPU.
    table = torch.arange(256, dtype=torch.uint8, device=data.device).view(fmt.storage).to(dtype)
    return table.index_select(0, data.view(torch.uint8).flatten().int()).view(data.shape)
