"""What decode and extend check and decide alike, on the host, before a launch."""

import torch
import triton.language as tl

from qkv_kernels.reference.attend import Plane, Rule
from qkv_kernels.triton import tuning
from qkv_kernels.triton.spec import MAX_GROUP, Problem, Side, check_index, check_rows, side

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
) -> tuple[torch.Tensor, Side, Side]:
    """q with unit stride, and both sides. Raises ValueError naming the argument."""
    q = check_rows(q, "q", (None, None, None))
    T, Hq, Dk = q.shape
    K, V = side(k, Dk, "k", arch), side(v, out.shape[-1], "v", arch)
    H = k.codes.shape[1]
    if v.codes.shape[:3] != k.codes.shape[:3]:
        raise ValueError(
            f"v.codes must have the pages, heads and block size of k.codes {[*k.codes.shape[:3]]}, got {[*v.codes.shape]}"
        )
    if Hq % H or Hq // H > MAX_GROUP:
        raise ValueError(f"q has {Hq} heads; it must be 1 to {MAX_GROUP} times the {H} kv heads")
    check_index(block_table, "block_table", torch.int32, 2)
    check_index(seq_lens, "seq_lens", torch.int32, 1)
    if len(block_table) != len(seq_lens):
        raise ValueError(f"block_table must have a row for each of the {len(seq_lens)} seq_lens, got {len(block_table)}")
    if out.shape[:2] != q.shape[:2] or out.dtype != q.dtype or out.stride(-1) != 1:
        raise ValueError(f"out must be {q.dtype} of shape ({T}, {Hq}, Dv) with unit stride, got {out.dtype} {tuple(out.shape)}")
    if rule.sinks is not None and (rule.sinks.shape != (Hq,) or rule.sinks.stride(0) != 1):
        raise ValueError(f"sinks must have shape ({Hq},), got {tuple(rule.sinks.shape)}")
    return q, K, V


def problem(q: torch.Tensor, K: Side, V: Side, G: int, rule: Rule, rows: int, keys: int) -> Problem:
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
    )


def _matrix_type(compute: torch.dtype, S: Side) -> tl.dtype:
    if compute == torch.float32 or S.fmt.storage == torch.float32:
        return tl.float32
    if S.kind != "raw":
        return tl.float16
    if S.fmt.storage == torch.bfloat16 and tuning.interpreted():
        return tl.float32  # the interpreter multiplies bfloat16 wrongly
    return _TYPES[S.fmt.storage]
