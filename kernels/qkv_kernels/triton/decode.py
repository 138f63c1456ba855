"""Attention of one new token per request over stored pages, split over the keys so that every processor has work.

Takes: one query row per request; K and V are in their pages already. Gives: attention output.
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
from qkv_kernels.triton.spec import power_of_two


def decode(
    q: torch.Tensor,
    k: Plane,
    v: Plane,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rule: Rule,
    out: torch.Tensor,
    splits: int,
    rows: Rows | None = None,
) -> None:
    """Row r of q is the last token of request r, which has seq_lens[r] keys (0: padding, its output is zero).

    q [R, Hq, Dk]; block_table [R, M] and seq_lens [R] int32. splits: programs that share the keys of a request (see split_count);
    a number of the host, so that a captured launch is valid for every length. rows: for formats with raw rows, the call's own K
    and V [R, H, D] and the slots of its requests' tails and sinks; tails do not hold the call's rows yet, sinks do.
    Writes out [R, Hq, Dv] in q's dtype.
    """
    for launch in decode_launches(q, k, v, block_table, seq_lens, rule, out, splits, tuning.arch(q.device), rows):
        launch.run()


def decode_launches(
    q: torch.Tensor,
    k: Plane,
    v: Plane,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rule: Rule,
    out: torch.Tensor,
    splits: int,
    arch: str,
    rows: Rows | None = None,
) -> list[Launch]:
    """Checks the arguments of decode (ValueError names them); what to launch on an architecture."""
    q, K, V = check_attend(q, k, v, block_table, seq_lens, rule, out, arch)
    R, H = len(seq_lens), k.codes.shape[1]
    if len(q) != R:
        raise ValueError(f"q must have one row per request: {R}, got {len(q)}")
    if splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    if R == 0:
        return []
    raw = check_rows_kept(rows, k, v, q, R)
    tile, keys, warps, stages = tuning.decode(arch, K, V)
    P = problem(q, K, V, q.shape[1] // H, rule, tile, keys)
    partial = partial_top = partial_total = None
    if splits > 1:
        partial = torch.empty(R, H, P.G, splits, V.D, dtype=torch.float32, device=q.device)
        partial_top, partial_total = torch.empty(2, R, H, P.G, splits, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:2], block_table.stride(0), *out.stride()[:2])
    args = (
        q,
        *pointers(k),
        *pointers(v),
        block_table,
        seq_lens,
        rule.sink_logits,
        out,
        partial,
        partial_top,
        partial_total,
        *strides,
        *raw,
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    launches = [Launch(decode_kernel, (splits, H, R), args, {"K": K, "V": V, "P": P, "SPLITS": splits}, options)]
    if splits > 1:
        args = (partial, partial_top, partial_total, v.static_scale, v.static_zero, rule.sink_logits, out, *out.stride()[:2])
        constants = {"V": V, "G": P.G, "SPLITS": splits, "LANES": power_of_two(splits)}
        launches.append(Launch(reduce_kernel, (P.G, H, R), args, constants, {"num_warps": 4, "enable_fp_fusion": True}))
    return launches


def split_count(requests: int, kv_heads: int, longest: int, processors: int) -> int:
    """Programs per request and kv head: two waves of programs for the processors, each with 256 keys or more."""
    wanted = triton.cdiv(2 * processors, max(1, requests * kv_heads))
    return max(1, min(wanted, triton.cdiv(longest, 256), 64))


@triton.jit
def decode_kernel(
    q, k_codes, k_scale, k_zero, k_static_scale, k_static_zero, v_codes, v_scale, v_zero, v_static_scale, v_static_zero,
    block_table, seq_lens, sink_logits, out, partial, partial_top, partial_total,
    q_stride_t, q_stride_h, table_stride, out_stride_t, out_stride_h,
    k_new, v_new, k_tail, v_tail, k_sink, v_sink, tail_slots, sink_slots, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (s, h, r): the s-th part of the keys of request r and kv head h, for the G query heads that share it."""
    split, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + request)
    begin = 0
    if P.window is not None:
        begin = tl.maximum(length - P.window, 0) // P.keys * P.keys
    coded = length
    if K.has_tail:
        coded = tl.maximum(raw_from(length - 1, K), begin)
    part = tl.cdiv(tl.cdiv(coded - begin, SPLITS), P.keys) * P.keys  # whole tiles, so that only the last one is masked
    start = begin + split * part
    stop = tl.minimum(start + part, coded)
    full = tl.maximum(stop // P.keys * P.keys, start)
    row = tl.arange(0, P.rows)
    row_head = head * P.G + row
    keep = row < P.G
    position = tl.full([P.rows], 0, tl.int32) + (length - 1)
    at = request.to(tl.int64)
    raw = None
    if K.mixed:  # the first program reads sinks, the last one the tail
        tail_slot, sink_slot = at, at
        if K.has_tail:
            tail_slot = tl.load(tail_slots + request)
        if K.has_sink:
            sink_slot = tl.load(sink_slots + request)
        raw_start = tl.maximum(raw_from(length - 1, K), 0)
        raw_stop = tl.where(split == SPLITS - 1, length, raw_start)
        sink_stop = tl.where(split == 0, tl.minimum(length, K.sink_tokens), 0)
        raw = (
            k_new, v_new, k_tail, v_tail, k_sink, v_sink, tail_slot, sink_slot, request, length - 1, raw_start, raw_stop,
            sink_stop, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
        )  # fmt: skip
    acc_low, acc_high, top, total = attend_rows(
        q + at * q_stride_t + row_head * q_stride_h, keep, position, start, full, stop, head, block_table + at * table_stride,
        k_codes, k_scale, k_zero, k_static_scale, k_static_zero, v_codes, v_scale, v_zero, v_static_scale, v_static_zero, raw,
        K, V, P,
    )  # fmt: skip
    c = tl.arange(0, V.lanes)
    mask = (row < P.G)[:, None] & (c < V.width)[None, :]
    if SPLITS == 1:
        share = total
        if sink_logits is not None:
            total = add_sink(top, total, tl.load(sink_logits + row_head, mask=keep, other=0.0))
        to = out + at * out_stride_t + (row_head * out_stride_h)[:, None] + c[None, :]
        low = finish(acc_low, share, total, head, 0, v_static_scale, v_static_zero, V)
        tl.store(to, low.to(out.dtype.element_ty), mask=mask)
        if V.streams == 2:
            high = finish(acc_high, share, total, head, 1, v_static_scale, v_static_zero, V)
            tl.store(to + V.width, high.to(out.dtype.element_ty), mask=mask)
    else:
        slot = ((at * tl.num_programs(1) + head) * P.G + row) * SPLITS + split
        to = partial + (slot * V.D)[:, None] + c[None, :]
        tl.store(to, acc_low, mask=mask)
        if V.streams == 2:
            tl.store(to + V.width, acc_high, mask=mask)
        tl.store(partial_top + slot, top, mask=row < P.G)
        tl.store(partial_total + slot, total, mask=row < P.G)


@triton.jit
def reduce_kernel(
    partial, partial_top, partial_total, v_static_scale, v_static_zero, sink_logits, out, out_stride_t, out_stride_h,
    V: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (g, h, r): joins the parts of one query head."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_head = head * G + tl.program_id(0)
    first = (request * tl.num_programs(1) * G + query_head) * SPLITS
    s = tl.arange(0, LANES)
    keep = s < SPLITS
    tops = tl.load(partial_top + first + s, mask=keep, other=float("-inf"))
    top = tl.max(tops, 0)
    weight = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    share = tl.sum(weight * tl.load(partial_total + first + s, mask=keep, other=0.0), 0) + tl.zeros([1], tl.float32)
    total = share
    if sink_logits is not None:
        total = add_sink(top, total, tl.load(sink_logits + query_head))
    STREAMS: tl.constexpr = V.streams
    for stream in tl.static_range(STREAMS):
        c = tl.arange(0, V.lanes)
        at = partial + (first + s)[:, None] * V.D + stream * V.width + c[None, :]
        parts = tl.load(at, mask=keep[:, None] & (c < V.width)[None, :], other=0.0)
        acc = tl.sum(parts * weight[:, None], 0)[None, :]
        result = finish(acc, share, total, head, stream, v_static_scale, v_static_zero, V)
        to = out + request * out_stride_t + query_head * out_stride_h + stream * V.width + c[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=(c < V.width)[None, :])
