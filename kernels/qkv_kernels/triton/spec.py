"""What the Triton kernels specialise on: the format of K or V with the strides of its planes, and the rule of a layer.

Takes: planes and rules as the reference takes them. Gives: hashable constants, or the reason why a format is refused.
Imports no triton. Does not know about: launching, tile sizes.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from qkv_kernels.format import STATIC_SCALES, UNFUSED, KVFormat
from qkv_kernels.reference import codec
from qkv_kernels.reference.attend import Plane
from qkv_kernels.triton import ptx

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_QUERIES_PER_KV_HEAD = 16  # query heads per kv head


@dataclass(frozen=True)
class PlaneSpec:
    """The plane of K or of V as the kernels see it. Strides in elements: of pages, heads and rows;
    of statics, heads and channels."""

    fmt: KVFormat
    D: int
    B: int
    codes: tuple[int, ...]
    scales: tuple[int, ...] = ()
    zeros: tuple[int, ...] = ()
    static_scales: tuple[int, int] = (0, 0)
    static_zeros: tuple[int, int] = (0, 0)
    convert: Literal["plain", "packed", "fp8"] = "plain"  # how codes are widened; fp8: packed, with the e4m3 instruction
    far: bool = False  # the heads of a page lie beyond what 32 bits address
    tail: tuple[int, ...] = ()  # of slots, heads and rows of raw tails, () where the format keeps none; sinks alike
    sink: tuple[int, ...] = ()

    @property
    def kind(self) -> Literal["raw", "int8", "int4", "int3", "int2", "e4m3", "e5m2"]:
        if self.fmt.raw:
            return "raw"
        packed: dict[int, Literal["int4", "int3", "int2"]] = {4: "int4", 3: "int3", 2: "int2"}
        if self.fmt.bits in packed:
            return packed[self.fmt.bits]
        names: dict[torch.dtype, Literal["int8", "e4m3", "e5m2"]] = {
            torch.int8: "int8",
            torch.float8_e4m3fn: "e4m3",
            torch.float8_e5m2: "e5m2",
        }
        return names[self.fmt.storage]

    @property
    def scale(self) -> Literal["none", "static", "token", "group", "block"]:
        """Where the scale is applied: nowhere, per channel outside the loop, per token on scores, or (group, block) on every
        element."""
        if self.fmt.scale in STATIC_SCALES:
            return "static"
        kinds: dict[str, Literal["none", "token", "group", "block"]] = {
            "none": "none",
            "token": "token",
            "token_group": "group",
            "block_channel": "block",
        }
        return kinds[self.fmt.scale]

    @property
    def zero(self) -> str:
        return self.fmt.zero

    @property
    def streams(self) -> int:
        """Products per tile. int4 keeps the first half of D in low nibbles, the second in high ones: two streams of width D/2.
        Fewer bits are spread to one code per channel when they are loaded."""
        return 2 if self.fmt.bits == 4 else 1

    @property
    def width(self) -> int:
        """Channels per stream, which are also the elements of a stored row."""
        return self.D // self.streams

    @property
    def lanes(self) -> int:
        """`width` rounded up to a power of two: a tile's size; lanes past `width` are masked."""
        return power_of_two(self.width)

    @property
    def row_bytes(self) -> int:
        """Of codes of one token and head."""
        return self.fmt.packed_dim(self.D) * self.fmt.storage.itemsize

    @property
    def runs(self) -> int:
        """What a row is encoded in: runs of consecutive channels, the codes of equal places of which share a byte."""
        return {4: 2, 3: 8, 2: 4}.get(self.fmt.bits, 1)

    @property
    def run(self) -> int:
        """Channels of a run."""
        return self.D // self.runs

    @property
    def run_lanes(self) -> int:
        return power_of_two(self.run)

    @property
    def all_lanes(self) -> int:
        return power_of_two(self.D)

    @property
    def mixed(self) -> bool:
        """Whether some keys are read raw, from tails or sinks."""
        return self.has_tail or self.has_sink

    @property
    def has_tail(self) -> bool:
        return bool(self.tail)

    @property
    def has_sink(self) -> bool:
        return bool(self.sink)

    @property
    def ring(self) -> int:
        """Rows of a raw tail; 0 where the format keeps none."""
        return self.fmt.tail_rows(self.B)

    @property
    def tail_blocks(self) -> int:
        return self.fmt.tail_blocks

    @property
    def sink_tokens(self) -> int:
        """First tokens of a sequence that are read raw."""
        return self.fmt.sink_tokens

    @property
    def code_offset(self) -> int:
        """What is added to codes that are packed, so that they are not negative."""
        return 1 << (self.fmt.bits - 1)

    @property
    def group(self) -> int:
        return self.fmt.group or 1

    @property
    def groups(self) -> int:
        """Scale groups per stream."""
        return self.width // self.group

    @property
    def code_min(self) -> float:
        return codec.code_range(self.fmt)[0]

    @property
    def code_max(self) -> float:
        return codec.code_range(self.fmt)[1]

    @property
    def scale_max(self) -> float:
        return float(torch.finfo(self.fmt.scale_dtype).max)

    @property
    def ptx_low(self) -> str:
        return ptx.widen(self.kind, 0, self.convert == "fp8")

    @property
    def ptx_high(self) -> str:
        return ptx.widen(self.kind, 1, self.convert == "fp8")

    @property
    def code_unit(self) -> float:
        """What a widened code must be multiplied with: e4m3 is read as float16 bits with another exponent bias."""
        return 256.0 if self.kind == "e4m3" and self.convert != "fp8" else 1.0

    @property
    def unit(self) -> float:
        """The part of code_unit that is left for outside the matrix product: groups and blocks take it into their scales."""
        return 1.0 if self.scale in ("group", "block") else self.code_unit


@dataclass(frozen=True)
class Problem:
    """The rest of what attention specialises on: one layer's rule, the compute types and the tile sizes.

    rows: query rows of a tile, (token, head) pairs of one kv head, token major. keys: keys of a tile.
    mat_k, mat_v: triton types of the two matrix products, mat_raw of both with raw rows. normalize: whether queries are scaled
    to fit float16. k_pages, v_pages: pages that a tile of keys is in, for scales of blocks. raw_keys: keys of a raw tile.
    """

    G: int
    rows: int
    keys: int
    scaling: float
    window: int | None
    softcap: float | None
    mat_k: object
    mat_v: object
    normalize: bool
    mat_raw: object
    k_pages: int
    v_pages: int
    raw_keys: int


def plane_spec(plane: Plane, D: int, name: str, arch: str) -> PlaneSpec:
    """Checks a plane against its format. Raises ValueError naming the plane (`name`) and the tensor."""
    fmt, N, H, B = plane.fmt, *plane.codes.shape[:3]
    reason = refusal(fmt, D)
    if reason:
        raise ValueError(f"{name}: {reason}")
    _check(plane.codes, f"{name}.codes", (N, H, B, fmt.packed_dim(D)), fmt.storage)
    shape, zero = fmt.scale_shape(N, H, B, D), fmt.zero != "none"
    static = {"tensor": (), "head": (H,), "channel": (H, D)}.get(fmt.scale)
    pool = {"scale": shape, "zero": shape if zero else None}
    given = {"static_scale": static, "static_zero": static if zero else None}
    for part, wanted in (pool | given).items():
        tensor = getattr(plane, part)
        if (tensor is None) != (wanted is None):
            raise ValueError(
                f"{name}.{part} must {'not ' if wanted is None else ''}be given for scale '{fmt.scale}', zero '{fmt.zero}'"
            )
        if tensor is not None and wanted is not None:
            _check(
                tensor, f"{name}.{part}", wanted, fmt.scale_dtype if part in pool else torch.float32, fmt.scale == "block_channel"
            )
    raw = {"tail": fmt.tail_rows(B), "sink": fmt.sink_tokens}
    for part, count in raw.items():
        tensor = getattr(plane, part)
        if (tensor is None) == (count > 0):
            raise ValueError(f"{name}.{part} must {'' if count else 'not '}be given: the format keeps {count} raw rows in it")
        if tensor is not None and (tensor.shape[1:] != (H, count, D) or tensor.stride(-1) != 1):
            raise ValueError(f"{name}.{part} must have shape (slots, {H}, {count}, {D}), got {tuple(tensor.shape)}")

    def pool_strides(t: torch.Tensor | None) -> tuple[int, ...]:
        return () if t is None else t.stride()[:3]

    def static_strides(t: torch.Tensor | None) -> tuple[int, int]:
        return (0, 0) if t is None or not t.dim() else (t.stride(0), t.stride(1) if t.dim() == 2 else 0)

    return PlaneSpec(
        fmt,
        D,
        B,
        plane.codes.stride()[:3],
        pool_strides(plane.scale),
        pool_strides(plane.zero),
        static_strides(plane.static_scale),
        static_strides(plane.static_zero),
        _conversion(arch),
        (H - 1) * plane.codes.stride(1) + B * plane.codes.stride(2) >= 2**31,
        pool_strides(plane.tail),
        pool_strides(plane.sink),
    )


def _conversion(arch: str) -> Literal["plain", "packed", "fp8"]:
    if not arch.startswith("sm_"):
        return "plain"
    return "fp8" if int(arch[3:]) >= 89 else "packed"


def refusal(fmt: KVFormat, D: int) -> str | None:
    """None if the kernels read and write the format at head dim D, else the reason and what would work."""
    if fmt.reading in UNFUSED:
        return UNFUSED[fmt.reading]
    reason = codec.refusal(fmt, D)
    if reason:
        return reason
    if fmt.rotate:
        return "Triton kernels do not rotate; formats without rotation run, block_channel among them"
    if fmt.raw and (fmt.unit == "block" or fmt.sink_tokens):
        return "raw formats need no tails and no sinks beside them: unit='token', sink_tokens=0"
    if not MIN_HEAD_DIM <= D <= MAX_HEAD_DIM or D % 8:
        return f"head dim {D} is not a multiple of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if fmt.bits == 64 or (fmt.raw and fmt.storage.itemsize * 8 != fmt.bits):
        return f"raw storage is float32, float16 or bfloat16, not {fmt.storage} with {fmt.bits} bits"
    if fmt.scale_dtype not in (torch.float16, torch.float32):
        return f"scales are float16 or float32, not {fmt.scale_dtype}"
    if fmt.group is not None:
        runs = {4: 2, 3: 8, 2: 4}.get(fmt.bits, 1)
        width = D // runs if fmt.bits == 4 or D & (D - 1) else D
        if fmt.group & (fmt.group - 1) or width % fmt.group:
            return f"scale groups of {fmt.group} channels: must be a power of two that divides {width} at head dim {D}"
    return None


def pair_refusal(k: KVFormat, v: KVFormat) -> str | None:
    """None if the kernels attend to K and V of these formats together, else the reason."""
    if any(getattr(k, part) != getattr(v, part) for part in ("unit", "tail_blocks", "sink_tokens")):
        return "K and V keep different raw rows: unit, tail_blocks and sink_tokens must be the same for both"
    return None


def check_rows(x: torch.Tensor, name: str, shape: tuple[int | None, ...]) -> torch.Tensor:
    """x with unit stride in its last dimension. Raises ValueError naming the argument."""
    if x.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, x.shape, strict=True)):
        raise ValueError(f"{name} must have shape {tuple('any' if n is None else n for n in shape)}, got {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} must be float32, float16 or bfloat16, got {x.dtype}")
    return x if x.stride(-1) == 1 else x.contiguous()


def check_index(x: torch.Tensor, name: str, dtype: torch.dtype, dim: int) -> None:
    """Raises ValueError naming the argument."""
    if x.dtype != dtype or x.dim() != dim or (x.numel() and x.stride(-1) != 1):
        raise ValueError(f"{name} must be {dim}-dimensional {dtype} with unit stride, got {x.dtype} of shape {tuple(x.shape)}")


def _check(t: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, unit: bool = False) -> None:
    if tuple(t.shape) != shape or t.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, got {t.dtype} of shape {tuple(t.shape)}")
    if len(shape) > 2 and t.stride(-1) != 1 and (len(shape) > 3 or unit):
        raise ValueError(f"{name} must have unit stride in its last dimension, got strides {t.stride()}")


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: kernels convert by integer arithmetic, the same on every architecture and in the interpreter."""
    return t.view(torch.uint8) if t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else t
