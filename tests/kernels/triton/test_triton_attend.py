"""The decode and extend kernels against the reference, in float64, on the same bytes; free pages hold NaN."""

from typing import Any

import pytest
import torch

from experiments.gpu.kernel_cases import FORMATS, Pool, make_pool
from qkv_kernels.reference.attend import Plane, Rule, attend

pytest.importorskip("triton", reason="triton is not installed")
from qkv_kernels.triton.append import append
from qkv_kernels.triton.decode import decode, split_count
from qkv_kernels.triton.extend import extend

pytestmark = pytest.mark.interpreter
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SHAPES: dict[str, dict[str, Any]] = {  # head counts and dims, then the layer's rule
    "gqa2": {},
    "mha": {"G": 1, "B": 64},
    "gqa3, dim 80, window": {"H": 1, "G": 3, "Dk": 80, "window": 19, "B": 8},
    "gqa16, softcap, sinks": {"H": 1, "G": 16, "softcap": 4.0, "sink_logits": True},
    "gqa5, dims 48 and 96, all rules": {
        "H": 1,
        "G": 5,
        "Dk": 48,
        "Dv": 96,
        "window": 40,
        "softcap": 9.0,
        "sink_logits": True,
        "B": 24,
    },
}


def setup(name: str, lengths: list[int], dtype: torch.dtype, H: int = 2, G: int = 2, Dk: int = 32, Dv: int | None = None,
          B: int = 16, window: int | None = None, softcap: float | None = None, sink_logits: bool = False,
          **more: Any):  # fmt: skip
    pool = make_pool(FORMATS[name], lengths, H, Dk, Dv, B, dtype, **more)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(sum(lengths), H * G, Dk, generator=generator).to(dtype)
    logits = torch.randn(H * G, generator=generator) if sink_logits else None
    return pool, q, Rule(Dk**-0.5, window, softcap, logits)


def expected(pool: Pool, q: torch.Tensor, counts: list[int], rule: Rule, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The reference for the last counts[r] tokens of every request; q [sum(counts), Hq, D]."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(pool.lengths, counts, strict=True)])
    decodes = len(counts) if set(counts) == {1} else 0
    sink_logits = None if rule.sink_logits is None else rule.sink_logits.to(dtype)
    return attend(
        q.to(dtype),
        pool.k,
        pool.v,
        pool.block_table,
        positions,
        starts,
        pool.lengths,
        decodes,
        rule._replace(sink_logits=sink_logits),
    )


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, name: str = "") -> None:
    """Twice the error of attention in `dtype` (products of about 1 with as many bits), plus rounding of the result."""
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3}[dtype]
    assert torch.isfinite(got).all()
    error = (got.double() - want).abs().max()
    assert error <= tolerance * want.abs().max(), f"{name}: {error:.2e} of {want.abs().max():.2e}"


def run_decode(pool: Pool, q: torch.Tensor, rule: Rule, splits: int) -> torch.Tensor:
    out = torch.full((len(q), q.shape[1], pool.v_rows.shape[2]), torch.nan, dtype=q.dtype)
    decode(q, pool.k, pool.v, pool.block_table, pool.seq_lens, rule, out, splits)
    return out


def run_extend(pool: Pool, q: torch.Tensor, counts: list[int], rule: Rule) -> torch.Tensor:
    starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)
    out = torch.full((len(q), q.shape[1], pool.v_rows.shape[2]), torch.nan, dtype=q.dtype)
    extend(q, pool.k, pool.v, pool.block_table, starts, pool.seq_lens, max(counts), rule, out)
    return out


def last_rows(q: torch.Tensor, lengths: list[int], counts: list[int]) -> torch.Tensor:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return torch.cat([q[e - c : e] for e, c in zip(ends, counts, strict=True)])


def check_decode(name: str, dtype: torch.dtype, splits: int = 2, lengths: tuple[int, ...] = (70, 1, 33), **shape: object) -> None:
    pool, q, rule = setup(name, [*lengths], dtype, **shape)  # type: ignore[arg-type]
    q = last_rows(q, pool.lengths, [1] * len(lengths))
    close(run_decode(pool, q, rule, splits), expected(pool, q, [1] * len(lengths), rule), dtype, name)


def check_extend(name: str, dtype: torch.dtype, counts: tuple[int, ...] = (37, 1, 9), **shape: object) -> None:
    lengths = [70, 1, 33]
    pool, q, rule = setup(name, lengths, dtype, **shape)  # type: ignore[arg-type]
    q = last_rows(q, lengths, [*counts])
    close(run_extend(pool, q, [*counts], rule), expected(pool, q, [*counts], rule), dtype, name)


@pytest.mark.parametrize("name", FORMATS)
def test_decode_of_every_format(name: str) -> None:
    check_decode(name, torch.float32)
    if name not in ("fp32", "bf16"):
        check_decode(name, torch.float16, splits=1)


@pytest.mark.parametrize("name", FORMATS)
def test_extend_of_every_format(name: str) -> None:
    check_extend(name, torch.float16 if name not in ("fp32", "bf16") else torch.float32, H=1, G=3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["fp16", "int8_zero", "int4_channel"])
def test_shapes_and_rules(name: str, shape: str) -> None:
    check_decode(name, torch.float32, **SHAPES[shape])
    check_extend(name, torch.float32, **SHAPES[shape])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [n for n in FORMATS if n != "bf16"])
def test_every_format_with_every_shape(name: str, shape: str, dtype: str) -> None:
    check_decode(name, DTYPES[dtype], **SHAPES[shape])
    check_extend(name, DTYPES[dtype], **SHAPES[shape])


@pytest.mark.slow
@pytest.mark.parametrize("D", [32, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("B", [8, 16, 32, 64, 128, 256])
def test_every_head_dim_and_block_size(D: int, B: int) -> None:
    for name in ("fp8_e4m3", "int8", "int4_group"):
        check_decode(name, torch.float16, H=1, Dk=D, B=B)
        check_extend(name, torch.float16, H=1, Dk=D, B=B)


@pytest.mark.parametrize(("D", "B"), [(64, 8), (96, 32), (112, 256), (128, 48), (256, 128)])
def test_head_dims_and_block_sizes(D: int, B: int) -> None:
    check_decode("int4_group", torch.float32, H=1, G=2, Dk=D, B=B, lengths=(45,))


@pytest.mark.parametrize("G", [1, 2, 3, 5, 7, 8, 12, 16])
def test_group_sizes(G: int) -> None:
    check_decode("int8", torch.float32, H=1, G=G, lengths=(20,))
    check_extend("int8", torch.float32, H=1, G=G, counts=(11, 1, 2))


def test_every_residue_of_length_modulo_block_size() -> None:
    lengths = list(range(16, 33))
    for splits in (1, 2):
        check_decode("int8_token", torch.float32, splits, tuple(lengths), H=1)
    for first in (0, 8):
        counts = [n - 8 for n in lengths[first : first + 9]]
        pool, q, rule = setup("int8_token", lengths[first : first + 9], torch.float32, H=1)
        q = last_rows(q, pool.lengths, counts)
        close(run_extend(pool, q, counts, rule), expected(pool, q, counts, rule), torch.float32)


@pytest.mark.parametrize("splits", [1, 3, 8, 40])
def test_splits_change_nothing(splits: int) -> None:
    """More splits than tiles leave some programs without keys."""
    check_decode("int8_zero", torch.float32, splits, (257, 3), H=1, sink_logits=True)


def test_empty_slots_of_a_batch_give_zeros() -> None:
    """A captured step has such slots where its batch is smaller than the captured size."""
    pool, q, rule = setup("int8", [40, 9], torch.float32, sink_logits=True)
    q = torch.cat([last_rows(q, pool.lengths, [1, 1]), torch.full((2, *q.shape[1:]), torch.nan)])
    pool.block_table = torch.cat([pool.block_table, torch.zeros(2, pool.block_table.shape[1], dtype=torch.int32)])
    pool.seq_lens = torch.cat([pool.seq_lens, torch.zeros(2, dtype=torch.int32)])
    for splits in (1, 2):
        out = run_decode(pool, q, rule, splits)
        assert not out[2:].any()
        close(out[:2], expected(make_pool(FORMATS["int8"], [40, 9]), q[:2], [1, 1], rule), torch.float32)


def test_pages_with_gaps_and_views_of_tables_and_queries() -> None:
    pool, q, rule = setup("int4_group", [40, 9], torch.float32, gap=2)
    wide = torch.full((5, pool.block_table.shape[1] + 7), 10**6, dtype=torch.int32)
    wide[1:3, : pool.block_table.shape[1]] = pool.block_table
    pool.block_table = wide[1:3, : pool.block_table.shape[1]]
    q = last_rows(q, pool.lengths, [1, 1])
    want = expected(pool, q, [1, 1], rule)
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    close(run_decode(pool, heads_first, rule, 2), want, torch.float32)
    close(run_extend(pool, heads_first, [1, 1], rule), want, torch.float32)


def spread_out(plane: Plane, axis: int) -> Plane:
    """The plane with its pages (axis 0) or heads (axis 1) so far apart that 32 bits do not address its elements."""
    codes = plane.codes
    strides = [*codes.stride()]
    strides[axis] = 2**30 if axis == 0 else 2**31
    strides[1 - axis] = codes[0, 0].numel()
    span = sum((n - 1) * s for n, s in zip(codes.shape, strides, strict=True)) + 1
    far = torch.empty(span, dtype=codes.dtype).as_strided(codes.shape, strides)  # touched pages only take memory
    return plane._replace(codes=far.copy_(codes))


@pytest.mark.parametrize("axis", [0, 1], ids=["pages", "heads"])
def test_pools_of_more_elements_than_32_bits_address(axis: int) -> None:
    lengths = [40, 9]
    pool, q, rule = setup("int8_token", lengths, torch.float32)
    want = expected(pool, last_rows(q, lengths, [1, 1]), [1, 1], rule)
    pool.k, pool.v = spread_out(pool.k, axis), spread_out(pool.v, axis)
    rows = last_rows(q, lengths, [1, 1])
    close(run_decode(pool, rows, rule, 2), want, torch.float32)
    close(run_extend(pool, rows, [1, 1], rule), want, torch.float32)
    stored = pool.k.codes.clone()
    pool.k.codes.zero_()
    append(pool.k_rows, pool.v_rows, pool.k, pool.v, pool.slots)
    for page in set((pool.slots // 16).tolist()):
        within = pool.slots[pool.slots // 16 == page] % 16
        assert torch.equal(pool.k.codes[page][:, within], stored[page][:, within])


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_queries_and_scales_beyond_float16_are_attended_all_the_same(factor: float) -> None:
    """Codes are multiplied in float16, so large and small values must go into float32 factors."""
    pool, q, rule = setup("int8", [50], torch.float16)
    wide = (q.float() * 1000)[-1:]
    planes: list[Plane] = []
    for plane in (pool.k, pool.v):
        scaled = {"static_scale": plane.static_scale / 1000} if plane.static_scale is not None else {}
        scaled |= {"scale": plane.scale * factor} if plane.scale is not None else {}
        planes.append(plane._replace(**scaled))
    pool.k, pool.v = planes
    q = wide.half()
    want = expected(pool, q, [1], rule)
    out = torch.empty(1, q.shape[1], pool.v_rows.shape[2], dtype=torch.float16)
    if factor > 1:  # the result itself must fit
        pool.v = pool.v._replace(scale=pool.v.scale / 8)
        want = expected(pool, q, [1], rule)
    decode(q, pool.k, pool.v, pool.block_table, pool.seq_lens, rule, out, 1)
    close(out, want, torch.float16)


def test_split_count_fills_the_processors_and_no_more() -> None:
    assert split_count(1, 8, 32768, 132) == 33
    assert split_count(64, 8, 8192, 132) == 1
    assert split_count(1, 8, 100, 132) == 1
    assert split_count(1, 1, 10**6, 132) == 64


def test_errors_name_the_argument() -> None:
    pool, q, rule = setup("int8", [20, 7], torch.float32)
    q, out = q[:2], torch.empty(2, 4, 32)
    good = {
        "q": q,
        "k": pool.k,
        "v": pool.v,
        "block_table": pool.block_table,
        "seq_lens": pool.seq_lens,
        "rule": rule,
        "out": out,
        "splits": 1,
    }
    for change, message in (
        ({"q": q.double()}, "q must be float32"),
        ({"q": q[:, :3]}, "q has 3 heads; it must be 1 to 16 times the 2 kv heads"),
        ({"q": q[:1], "out": out[:1]}, "q must have one row per request: 2"),
        ({"v": pool.v._replace(codes=pool.v.codes[:1], scale=pool.v.scale[:1])}, "v.codes must have the pages"),
        ({"block_table": pool.block_table.long()}, "block_table must be 2-dimensional torch.int32"),
        ({"block_table": pool.block_table[:1]}, "block_table must have a row for each of the 2"),
        ({"seq_lens": pool.seq_lens.long()}, "seq_lens must be 1-dimensional torch.int32"),
        ({"out": out.half()}, "out must be torch.float32"),
        ({"rule": rule._replace(sink_logits=torch.ones(3))}, "sink_logits must have shape"),
        ({"splits": 0}, "splits must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(**(good | change))
    with pytest.raises(ValueError, match="query_start must have 3 entries for 2 requests"):
        extend(q, pool.k, pool.v, pool.block_table, pool.seq_lens, pool.seq_lens, 1, rule, out)
