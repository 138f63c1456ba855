"""What formats with raw rows store besides codes: rings of recent rows, first rows, and blocks encoded once they are complete.

Takes: rows as the model made them, the slots of each request's tail and sinks. Gives: bytes equal to the reference's
(reference/tail.py). Does not know about: attention.
"""

import torch
import triton
import triton.language as tl

from qkv_kernels.reference.overlay import Rows
from qkv_kernels.reference.planes import Plane
from qkv_kernels.triton import tuning
from qkv_kernels.triton._raw import raw_rows
from qkv_kernels.triton._tiles import dynamic_scale
from qkv_kernels.triton.append import lanes, pointers, store_rows
from qkv_kernels.triton.launch import Launch
from qkv_kernels.triton.spec import PlaneSpec, check_index, check_rows, plane_spec, power_of_two


def seal(
    rows: Rows, k: Plane, v: Plane, block_table: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, longest: int
) -> None:
    """Encodes the blocks that this call completes, from the requests' rings and the call's own rows, into their pages.

    rows.k [T, H, Dk], rows.v [T, H, Dv], rows.tail_slots [R] int64: rows query_start[r] to query_start[r+1] are the last tokens
    of request r, which has seq_lens[r] then. block_table [R, M], query_start [R+1], seq_lens [R], all int32. longest: rows of the
    longest request, on the host. Rings do not hold the call's rows yet.
    """
    for launch in seal_launches(rows, k, v, block_table, query_start, seq_lens, longest, tuning.arch(rows.k.device)):
        launch.run()


def keep_first(rows: Rows, k: Plane, v: Plane, query_start: torch.Tensor, seq_lens: torch.Tensor, longest: int) -> None:
    """Puts those of the call's rows that begin their sequence into the sinks: before attention, which reads them there."""
    for launch in keep_launches(rows, k, v, query_start, seq_lens, longest, True, tuning.arch(rows.k.device)):
        launch.run()


def keep_last(rows: Rows, k: Plane, v: Plane, query_start: torch.Tensor, seq_lens: torch.Tensor, longest: int) -> None:
    """Puts the call's last rows into the rings: after attention, which may still read what they replace."""
    for launch in keep_launches(rows, k, v, query_start, seq_lens, longest, False, tuning.arch(rows.k.device)):
        launch.run()


def seal_launches(
    rows: Rows,
    k: Plane,
    v: Plane,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    arch: str,
) -> list[Launch]:
    """Checks the arguments of seal (ValueError names them); what to launch on an architecture."""
    new_k, new_v, K, V = _checked(rows, k, v, query_start, seq_lens, arch)
    check_index(block_table, "block_table", torch.int32, 2)
    if rows.tail_slots is None or k.tail is None or v.tail is None:
        raise ValueError("seal needs tails: the formats of K and V must encode whole blocks, and rows.tail_slots be given")
    if not longest:
        return []
    args = (new_k, new_v, *pointers(k), *pointers(v), k.tail, v.tail, rows.tail_slots, block_table, query_start, seq_lens,
            block_table.stride(0), *new_k.stride()[:2], *new_v.stride()[:2])  # fmt: skip
    constants = {"K": K, "V": V, "ROWS": min(16, power_of_two(K.B))}
    grid = (-(-longest // K.B), new_k.shape[1], len(seq_lens))
    # A fused multiply-add rounds once where the reference rounds twice.
    return [Launch(seal_kernel, grid, args, constants, {"num_warps": 4, "enable_fp_fusion": False})]


def keep_launches(
    rows: Rows, k: Plane, v: Plane, query_start: torch.Tensor, seq_lens: torch.Tensor, longest: int, first: bool, arch: str
) -> list[Launch]:
    """Checks the arguments of keep_first or keep_last (ValueError names them); what to launch on an architecture."""
    new_k, new_v, K, V = _checked(rows, k, v, query_start, seq_lens, arch)
    slots, kept = (rows.sink_slots, (k.sink, v.sink)) if first else (rows.tail_slots, (k.tail, v.tail))
    if slots is None or None in kept:
        raise ValueError(f"these formats keep no {'sinks' if first else 'tails'}, or rows names no slots for them")
    most = min(longest, K.sink_tokens if first else K.ring)
    if not most:
        return []
    ROWS = 4 if arch != "interpreter" else 16
    args = (new_k, new_v, *kept, slots, query_start, seq_lens, *new_k.stride()[:2], *new_v.stride()[:2])
    constants = {"K": K, "V": V, "FIRST": first, "ROWS": ROWS}
    return [Launch(keep_kernel, (-(-most // ROWS), new_k.shape[1], len(seq_lens)), args, constants, {"num_warps": 2})]


def _checked(
    rows: Rows, k: Plane, v: Plane, query_start: torch.Tensor, seq_lens: torch.Tensor, arch: str
) -> tuple[torch.Tensor, torch.Tensor, PlaneSpec, PlaneSpec]:
    new_k, new_v = check_rows(rows.k, "rows.k", (None, None, None)), check_rows(rows.v, "rows.v", (*rows.k.shape[:2], None))
    check_index(query_start, "query_start", torch.int32, 1)
    check_index(seq_lens, "seq_lens", torch.int32, 1)
    for name, slots in (("tail_slots", rows.tail_slots), ("sink_slots", rows.sink_slots)):
        if slots is not None:
            check_index(slots, f"rows.{name}", torch.int64, 1)
    return new_k, new_v, plane_spec(k, new_k.shape[2], "k", arch), plane_spec(v, new_v.shape[2], "v", arch)


@triton.jit
def seal_kernel(
    k, v, k_codes, k_scale, k_zero, k_static_scale, k_static_zero, v_codes, v_scale, v_zero, v_static_scale, v_static_zero,
    k_tail, v_tail, tail_slots, block_table, query_start, seq_lens, table_stride, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, h, r): the i-th block that request r has rows of in this call, if the call completes it."""
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_row = tl.load(query_start + request)
    length = tl.load(seq_lens + request)
    start = length - (tl.load(query_start + request + 1) - first_row)
    block = start // K.B + tl.program_id(0)
    if (block + 1) * K.B > length:
        return
    page = tl.load(block_table + request.to(tl.int64) * table_stride + block).to(tl.int64)
    slot = tl.load(tail_slots + request)
    seal_side(
        k, k_tail, block, page, first_row, start, slot, head, k_stride_t, k_stride_h,
        k_codes, k_scale, k_zero, k_static_scale, k_static_zero, K, ROWS,
    )  # fmt: skip
    seal_side(
        v, v_tail, block, page, first_row, start, slot, head, v_stride_t, v_stride_h,
        v_codes, v_scale, v_zero, v_static_scale, v_static_zero, V, ROWS,
    )  # fmt: skip


@triton.jit
def seal_side(
    new, tail, block, page, first_row, start, slot, head, stride_t, stride_h, codes, scale, zero, static_scale, static_zero,
    S: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One side of a block: the range of every channel first, where blocks have scales of channels, then the codes."""
    channel, real = lanes(S)
    s, z = None, None
    if S.scale == "block":
        low = tl.full(channel.shape, float("inf"), tl.float32)
        high = tl.full(channel.shape, float("-inf"), tl.float32)
        for begin in range(0, S.B, ROWS):
            offset = begin + tl.arange(0, ROWS)
            at = raw_rows(new, tail, block * S.B + offset, first_row, start, slot, head, stride_t, stride_h, S, False)
            keep = (offset < S.B)[:, None] & real[None, :]
            x = tl.load(at[:, None] + channel[None, :], mask=keep, other=0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(keep, x, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(keep, x, float("-inf")), 0))
        stored, stored_zero = dynamic_scale(tl.where(real, low, 0.0), tl.where(real, high, 0.0), S, scale.dtype.element_ty)
        tl.store(scale + (page * S.scales[0] + head * S.scales[1]) + channel * S.scales[2], stored, mask=real)
        if S.zero != "none":
            tl.store(zero + (page * S.zeros[0] + head * S.zeros[1]) + channel * S.zeros[2], stored_zero, mask=real)
        s, z = stored.to(tl.float32), stored_zero.to(tl.float32)
    for begin in range(0, S.B, ROWS):
        offset = begin + tl.arange(0, ROWS)
        at = raw_rows(new, tail, block * S.B + offset, first_row, start, slot, head, stride_t, stride_h, S, False)
        to = tl.where(offset < S.B, page * S.B + offset, -1)
        store_rows(at, to, head, codes, scale, zero, static_scale, static_zero, s, z, S)


@triton.jit
def keep_kernel(
    k, v, k_kept, v_kept, slots, query_start, seq_lens, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    K: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, h, r): ROWS of the rows of request r that its ring, or with FIRST its sinks, are to hold."""
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_row = tl.load(query_start + request)
    length = tl.load(seq_lens + request)
    start = length - (tl.load(query_start + request + 1) - first_row)
    slot = tl.load(slots + request)
    position = start + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if FIRST:
        keep = (position >= 0) & (position < tl.minimum(length, K.sink_tokens))
    else:
        position += tl.maximum(length - K.ring - start, 0)
        keep = (position >= 0) & (position < length)
    row = (first_row + position - start).to(tl.int64)
    keep_side(k + row * k_stride_t + head * k_stride_h, k_kept, slot, position, keep, head, K, FIRST)
    keep_side(v + row * v_stride_t + head * v_stride_h, v_kept, slot, position, keep, head, V, FIRST)


@triton.jit
def keep_side(rows, kept, slot, position, keep, head, S: tl.constexpr, FIRST: tl.constexpr):
    if FIRST:
        at = kept + slot * S.sink[0] + head * S.sink[1] + position * S.sink[2]
    else:
        at = kept + slot * S.tail[0] + head * S.tail[1] + position % S.ring * S.tail[2]
    c = tl.arange(0, S.all_lanes)
    mask = keep[:, None] & (c < S.D)[None, :]
    tl.store(at[:, None] + c[None, :], tl.load(rows[:, None] + c[None, :], mask=mask), mask=mask)
