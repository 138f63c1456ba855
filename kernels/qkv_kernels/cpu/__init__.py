"""The CPU kernels: one operator, torch.ops.qkv_cpu.attend, which stores K and V and attends from the pool.

Takes: the same planes, statics and metadata as the reference. Gives: the same codes, and attention to within rounding.
Does not know about: layers, quantizers.

Legend: T rows · R requests · H kv heads · Hq query heads · D head dim · B block size · M blocks per request.
"""

import os
from typing import NamedTuple

import torch

from qkv_kernels.cpu.build import BuildError, library
from qkv_kernels.format import STATIC_SCALES, UNFUSED, KVFormat
from qkv_kernels.reference.packing import multiple_of
from qkv_kernels.reference.planes import Plane

__all__ = ["BuildError", "attend", "expand", "format_numbers", "instruction_set", "load", "refusal"]

MAX_QUERIES_PER_KV_HEAD = 32  # MAX_G in args.h
SCALES = ("none", "tensor", "head", "channel", "token", "token_group", "block_channel")  # in the order of args.h
ZEROS = ("none", "code", "float")
_NOTHING = torch.empty(0)

_loaded = False


class FormatNumbers(NamedTuple):
    """What the tensors of a plane do not tell of its format, in the order that ops.cpp reads."""

    scale: int  # place in SCALES
    zero: int  # place in ZEROS
    group: int
    bits: int
    rotate: int


class PlaneTensors(NamedTuple):
    """K or V of a head range in the order that ops.cpp reads; None where the format has no such tensor."""

    codes: torch.Tensor  # [N, H, B, Dp]
    scale: torch.Tensor | None  # of the pool, like zero
    zero: torch.Tensor | None
    head_scale: torch.Tensor | None  # [H], static
    channel_scale: torch.Tensor | None  # [H, D], static
    static_zero: torch.Tensor | None  # [H, D]
    tail: torch.Tensor | None  # [slots, H, rows, D], like sink
    sink: torch.Tensor | None


def load(path: str | None = None) -> None:
    """Build if needed, and register the operator, once. path: load this library instead. Raises BuildError."""
    global _loaded
    if _loaded:
        return
    torch.ops.load_library(path or str(library()))
    _loaded = True

    @torch.library.register_fake("qkv_cpu::attend")
    def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def instruction_set(asked: str | None = None) -> str:
    """avx512, avx2 or portable: the best this machine runs, unless `asked` or QKV_CPU_ISA is a lesser one.

    Raises ValueError for what this machine does not run.
    """
    best = torch.ops.qkv_cpu.best_isa()
    order = ("portable", "avx2", "avx512")
    asked = os.environ.get("QKV_CPU_ISA", best) if asked is None else asked
    if asked not in order or order.index(asked) > order.index(best):
        allowed = ", ".join(order[: order.index(best) + 1])
        raise ValueError(f"instruction set {asked!r} does not run on this machine; allowed: {allowed}")
    return asked


def refusal(fmt: KVFormat, D: int) -> str | None:
    """None if the kernels read and write this format at head dim D, else the reason."""
    if fmt.reading in UNFUSED:
        return UNFUSED[fmt.reading]
    if fmt.raw:
        known = fmt.storage in (torch.float32, torch.bfloat16, torch.float16)
        return None if known else f"the cpu kernels have no raw {fmt.storage}"
    known = (fmt.bits, fmt.storage) in (
        *((8, d) for d in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)),
        *((bits, torch.uint8) for bits in (4, 3, 2)),
    )
    if not known:
        return f"the cpu kernels have no {fmt.bits}-bit codes in {fmt.storage}"
    if fmt.storage.is_floating_point and fmt.zero != "none":
        return "fp8 codes take no zero point"
    if fmt.bits < 8 and D % multiple_of(fmt.bits):
        return f"{fmt.bits}-bit codes need a head dim that is a multiple of {multiple_of(fmt.bits)}, not {D}"
    if fmt.group is not None and D % fmt.group:
        return f"head dim {D} is not a multiple of the scale group {fmt.group}"
    return None if fmt.scale_dtype in (torch.float16, torch.float32) else f"the cpu kernels have no {fmt.scale_dtype} scales"


def format_numbers(fmt: KVFormat) -> list[int]:
    """A FormatNumbers as the list that the operator takes."""
    numbers = FormatNumbers(
        scale=SCALES.index(fmt.scale), zero=ZEROS.index(fmt.zero), group=fmt.group or 0, bits=fmt.bits, rotate=int(fmt.rotate)
    )
    return list(numbers)


def expand(plane: Plane, D: int) -> list[torch.Tensor]:
    """A PlaneTensors of K or V, whose head dim is D, as the list that the operator takes: an absent tensor has no elements."""
    H = plane.codes.shape[1]
    head = channel = fixed_zero = None
    if plane.fmt.scale in STATIC_SCALES and plane.static_scale is not None:
        if plane.fmt.scale == "channel":
            channel = plane.static_scale.float().contiguous()
        else:
            head = plane.static_scale.float().expand(H).contiguous()
        if plane.static_zero is not None:
            shaped = plane.static_zero.float() if plane.fmt.scale != "head" else plane.static_zero.float()[:, None]
            fixed_zero = shaped.expand(H, D).contiguous()
    tensors = PlaneTensors(
        codes=plane.codes,
        scale=plane.scale,
        zero=plane.zero,
        head_scale=head,
        channel_scale=channel,
        static_zero=fixed_zero,
        tail=plane.tail,
        sink=plane.sink,
    )
    return [_NOTHING if x is None else x for x in tensors]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    planes: list[torch.Tensor],
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sink_logits: torch.Tensor | None,
    formats: list[int],
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    store: bool = True,
    deterministic: bool = False,
    isa: str = "portable",
    tail_slots: torch.Tensor | None = None,
    sink_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode and store K, V (unless store is false: they are in the pool already), then attend from the pool.

    q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv] of one dtype (float32, bfloat16, float16); planes: expand() of K, then of V, written
    in place; formats: format_numbers() of K, then of V; block_table [R, M] int32, query_start [R + 1] int32, slots and
    positions [T] int64, tail_slots and sink_slots [R] int64 (where formats keep raw rows) as in qkv.layout. Raw rows are kept
    whether store or not. deterministic: a row's result does not depend, to the bit, on its batch, chunk or
    block size; slower in prefill. Returns [T, Hq, Dv] in q's dtype, zeros for padding rows.
    """
    return torch.ops.qkv_cpu.attend(
        q, k, v, planes, block_table, query_start, slots, positions, tail_slots, sink_slots, sink_logits, formats, scaling,
        window or 0, softcap or 0.0, store, deterministic, isa,
    )  # fmt: skip
