"""Causal attention of prompt chunks over stored pages, each request with its own length.

Takes: queries of several requests, packed; K and V are in their pages already. Gives: attention output.
Does not know about: how rows were encoded or written.
"""

import torch
import triton
import triton.language as tl

from qkv_kernels.reference.attend import Plane, Rule
from qkv_kernels.reference.overlay import Rows
from qkv_kernels.triton import tuning
from qkv_kernels.triton._attend import add_sink, attend_rows, finish
from qkv_kernels.triton._raw import raw_from
from qkv_kernels.triton.append import pointers
from qkv_kernels.triton.launch import Launch
from qkv_kernels.triton.problem import check_attend, check_rows_kept, problem
from qkv_kernels.triton.spec import check_index


def extend(
    q: torch.Tensor,
    k: Plane,
    v: Plane,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    rule: Rule,
    out: torch.Tensor,
    rows: Rows | None = None,
) -> None:
    """Rows query_start[r] to query_start[r+1] of q are the last tokens of request r, which has seq_lens[r] keys.

    q [T, Hq, Dk]; block_table [R, M], query_start [R+1], seq_lens [R], all int32; longest: rows of the longest request, on the
    host. rows: for formats with raw rows, the call's own K and V [T, H, D], packed like q, and the slots of its requests' tails
    and sinks; tails do not hold the call's rows yet, sinks do. Writes out [T, Hq, Dv] in q's dtype; rows of no request are left
    as they are.
    """
    for launch in extend_launches(q, k, v, block_table, query_start, seq_lens, longest, rule, out, tuning.arch(q.device), rows):
        launch.run()


def extend_launches(
    q: torch.Tensor,
    k: Plane,
    v: Plane,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    rule: Rule,
    out: torch.Tensor,
    arch: str,
    rows: Rows | None = None,
) -> list[Launch]:
    """Checks the arguments of extend (ValueError names them); what to launch on an architecture."""
    q, K, V = check_attend(q, k, v, block_table, seq_lens, rule, out, arch)
    R, H = len(seq_lens), k.codes.shape[1]
    check_index(query_start, "query_start", torch.int32, 1)
    if len(query_start) != R + 1:
        raise ValueError(f"query_start must have {R + 1} entries for {R} requests, got {len(query_start)}")
    if not R or not longest:
        return []
    raw = check_rows_kept(rows, k, v, q, R)
    tile, keys, warps, stages = tuning.extend(arch, K, V)
    P = problem(q, K, V, q.shape[1] // H, rule, tile, keys)
    grid = (triton.cdiv(longest, P.rows // P.G), H, R)
    strides = (*q.stride()[:2], block_table.stride(0), *out.stride()[:2])
    args = (q, *pointers(k), *pointers(v), block_table, query_start, seq_lens, rule.sink_logits, out, *strides, *raw)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return [Launch(extend_kernel, grid, args, {"K": K, "V": V, "P": P}, options)]


@triton.jit
def extend_kernel(
    q, k_codes, k_scale, k_zero, k_static_scale, k_static_zero, v_codes, v_scale, v_zero, v_static_scale, v_static_zero,
    block_table, query_start, seq_lens, sink_logits, out, q_stride_t, q_stride_h, table_stride, out_stride_t, out_stride_h,
    k_new, v_new, k_tail, v_tail, k_sink, v_sink, tail_slots, sink_slots, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Program (i, h, r): the i-th tile from the end (the longest rows first) of request r and kv head h."""
    TOKENS: tl.constexpr = P.rows // P.G
    head, request = tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - first_row
    tile = tl.cdiv(count, TOKENS) - 1 - tl.program_id(0)
    if tile < 0:
        return
    row = tl.arange(0, P.rows)
    token = tile * TOKENS + row // P.G
    row_head = head * P.G + row % P.G
    keep = (row < TOKENS * P.G) & (token < count)
    length = tl.load(seq_lens + request)
    first = length - count + tile * TOKENS  # position of the tile's first token
    position = length - count + token
    stop = tl.minimum(first + TOKENS, length)
    start = 0
    if P.window is not None:
        start = tl.maximum(first - P.window + 1, 0) // P.keys * P.keys
    full = (first + 1) // P.keys * P.keys
    raw = None
    if K.mixed:
        tail_slot, sink_slot = request.to(tl.int64), request.to(tl.int64)
        raw_start, raw_stop = stop, stop
        if K.has_tail:
            tail_slot = tl.load(tail_slots + request)
            raw_start = tl.maximum(raw_from(first, K), 0)
            full = raw_start // P.keys * P.keys
        if K.has_sink:
            sink_slot = tl.load(sink_slots + request)
        raw = (
            k_new, v_new, k_tail, v_tail, k_sink, v_sink, tail_slot, sink_slot, first_row, length - count, raw_start, raw_stop,
            tl.minimum(stop, K.sink_tokens), k_stride_t, k_stride_h, v_stride_t, v_stride_h,
        )  # fmt: skip
        if K.has_tail:
            stop = tl.maximum(raw_from(stop - 1, K), start)
            full = tl.maximum(full, start)
    at = (first_row + token).to(tl.int64)
    acc_low, acc_high, top, total = attend_rows(
        q + at * q_stride_t + row_head * q_stride_h, keep, position, start, full, stop, head,
        block_table + request.to(tl.int64) * table_stride,
        k_codes, k_scale, k_zero, k_static_scale, k_static_zero, v_codes, v_scale, v_zero, v_static_scale, v_static_zero, raw,
        K, V, P,
    )  # fmt: skip
    share = total
    if sink_logits is not None:
        total = add_sink(top, total, tl.load(sink_logits + row_head, mask=keep, other=0.0))
    c = tl.arange(0, V.lanes)
    to = out + (at * out_stride_t + row_head * out_stride_h)[:, None] + c[None, :]
    mask = keep[:, None] & (c < V.width)[None, :]
    low = finish(acc_low, share, total, head, 0, v_static_scale, v_static_zero, V)
    tl.store(to, low.to(out.dtype.element_ty), mask=mask)
    if V.streams == 2:
        high = finish(acc_high, share, total, head, 1, v_static_scale, v_static_zero, V)
        tl.store(to + V.width, high.to(out.dtype.element_ty), mask=mask)
