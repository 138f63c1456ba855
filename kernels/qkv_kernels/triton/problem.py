"""What decode and extend check and decide alike, on the host, before a launch."""

import torch
import triton.language as tl

from qkv_kernels.reference.attend import Plane, Rule
from qkv_kernels.reference.overlay import Rows
from qkv_kernels.triton import tuning
from qkv_kernels.triton.spec import MAX_QUERIES_PER_KV_HEAD, PlaneSpec, Problem, check_index, check_rows, pair_refusal, plane_spec

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def check_attend(
    q: torch.Tensor,
    k: Plane,
    v: Plane,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rule: Rule,
    out: torch.Tensor,
    arch: str,
) -> tuple[torch.Tensor, PlaneSpec, PlaneSpec]:
    """q with unit stride, and what the kernels know of K and of V. Raises ValueError naming the argument."""
    q = check_rows(q, "q", (None, None, None))
    T, Hq, Dk = q.shape
    K, V = plane_spec(k, Dk, "k", arch), plane_spec(v, out.shape[-1], "v", arch)
    H = k.codes.shape[1]
    if v.codes.shape[:3] != k.codes.shape[:3]:
        raise ValueError(
            f"v.codes must have the pages, heads and block size of k.codes {[*k.codes.shape[:3]]}, got {[*v.codes.shape]}"
        )
    if (reason := pair_refusal(k.fmt, v.fmt)) is not None:
        raise ValueError(reason)
    if Hq % H or Hq // H > MAX_QUERIES_PER_KV_HEAD:
        raise ValueError(f"q has {Hq} heads; it must be 1 to {MAX_QUERIES_PER_KV_HEAD} times the {H} kv heads")
    check_index(block_table, "block_table", torch.int32, 2)
    check_index(seq_lens, "seq_lens", torch.int32, 1)
    if len(block_table) != len(seq_lens):
        raise ValueError(f"block_table must have a row for each of the {len(seq_lens)} seq_lens, got {len(block_table)}")
    if out.shape[:2] != q.shape[:2] or out.dtype != q.dtype or out.stride(-1) != 1:
        raise ValueError(f"out must be {q.dtype} of shape ({T}, {Hq}, Dv) with unit stride, got {out.dtype} {tuple(out.shape)}")
    if rule.sink_logits is not None and (rule.sink_logits.shape != (Hq,) or rule.sink_logits.stride(0) != 1):
        raise ValueError(f"sink_logits must have shape ({Hq},), got {tuple(rule.sink_logits.shape)}")
    return q, K, V


def check_rows_kept(rows: Rows | None, k: Plane, v: Plane, q: torch.Tensor, requests: int) -> tuple[object, ...]:
    """Arguments that name the raw rows, in the order that kernels take them; None and 0 where the format keeps none.

    Raises ValueError naming the argument.
    """
    if k.tail is None and k.sink is None:
        return (None,) * 8 + (0,) * 4
    if rows is None:
        raise ValueError("rows must be given: the formats keep raw rows")
    for part, slots in (("tail", rows.tail_slots), ("sink", rows.sink_slots)):
        if getattr(k, part) is None:
            continue
        if slots is None or len(slots) < requests:
            raise ValueError(f"rows.{part}_slots must have an entry for each of the {requests} requests")
        check_index(slots, f"rows.{part}_slots", torch.int64, 1)
        for name, plane in (("k", k), ("v", v)):
            if getattr(plane, part).dtype != q.dtype:
                raise ValueError(f"{name}.{part} must be {q.dtype} like q, got {getattr(plane, part).dtype}")
    for name, x in (("rows.k", rows.k), ("rows.v", rows.v)):
        if x.dtype != q.dtype or x.dim() != 3 or x.stride(-1) != 1:
            raise ValueError(f"{name} must be {q.dtype} of shape (T, H, D) with unit stride, got {x.dtype} {tuple(x.shape)}")
    tail_slots, sink_slots = (s if p is not None else None for s, p in ((rows.tail_slots, k.tail), (rows.sink_slots, k.sink)))
    return rows.k, rows.v, k.tail, v.tail, k.sink, v.sink, tail_slots, sink_slots, *rows.k.stride()[:2], *rows.v.stride()[:2]


def problem(q: torch.Tensor, K: PlaneSpec, V: PlaneSpec, G: int, rule: Rule, rows: int, keys: int) -> Problem:
    """Float32 queries are attended in float32. Otherwise codes are widened to float16, exactly, and rows stored as 16-bit floats
    are multiplied as such; queries are scaled to fit where float16 is not their own type."""
    mat_k, mat_v = _matrix_type(q.dtype, K), _matrix_type(q.dtype, V)
    normalize = mat_k == tl.float16 and (q.dtype != torch.float16 or K.kind != "raw")
    return Problem(
        G=G,
        rows=max(rows, 1 << (G - 1).bit_length()),
        keys=keys,
        scaling=rule.scaling,
        window=rule.window,
        softcap=rule.softcap,
        mat_k=mat_k,
        mat_v=mat_v,
        normalize=normalize,
        mat_raw=_TYPES[torch.float32 if q.dtype == torch.bfloat16 and tuning.interpreted() else q.dtype],
        k_pages=_pages(K, keys),
        v_pages=_pages(V, keys),
        raw_keys=min(keys, 32),
    )


def _pages(S: PlaneSpec, keys: int) -> int:
    """Pages of a tile of keys; as many as keys where pages do not divide it."""
    if S.B % keys == 0:
        return 1
    return keys // S.B if keys % S.B == 0 else keys


def _matrix_type(compute: torch.dtype, S: PlaneSpec) -> tl.dtype:
    if compute == torch.float32 or S.fmt.storage == torch.float32:
        return tl.float32
    if S.kind != "raw":
        return tl.float16
    if S.fmt.storage == torch.bfloat16 and tuning.interpreted():
        return tl.float32  # the interpreter multiplies bfloat16 wrongly
    return _TYPES[S.fmt.storage]
