"""Paged attention against dense float64 attention over the stored values, and its invariances."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.layout import AttentionMetadata, HeadFormat, LayerShape
from qkv.policies.quantizer.none import NoneQuantizer
from qkv_kernels.reference import attend as module
from qkv_kernels.reference.planes import Plane
from tests.kernels.paged import CPU, Paged, any_shape, dense, shape

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mha": {"G": 1},
    "gqa3": {"H": 3, "G": 3},
    "gqa8": {"H": 1, "G": 8},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "softcap": {"softcap": 3.0},
    "sinks": {"sink_logits": True},
    "mla": {"Dk": 24, "Dv": 16},
    "all": {"H": 1, "G": 5, "Dk": 12, "Dv": 20, "window": 11, "softcap": 5.0, "sink_logits": True},
}
QUANTIZERS = ["none", "fp8", "int8", {"name": "int8", "zero_point": True}, "int8_token", "int4", "rotated"]
BLOCK_UNIT = [
    "kivi",
    {"name": "kivi", "v_bits": 2, "tail_blocks": 2},
    {"name": "protected", "inner": "rotated", "sink_tokens": 3, "tail_blocks": 0},
]
PROTECTED = [
    {"name": "protected", "inner": {"name": "rotated", "group": 32}, "heads": [[0, 0]], "wide": "int8_token"},
    {"name": "protected", "inner": "int4", "sink_tokens": 5},
]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def mixed(lengths: list[int], chunk: int) -> list[dict[int, int]]:
    """Prefill request by request in chunks, while earlier requests decode; keeps four tokens of each for decoding."""
    schedule, left = [], list(lengths)
    for r in range(len(lengths)):
        while left[r] > 4:
            n = min(chunk, left[r] - 4)
            work = {e: 1 for e in range(r) if left[e]} | {r: n}
            for e, used in work.items():
                left[e] -= used
            schedule.append(work)
    while any(left):
        work = {r: 1 for r in range(len(lengths)) if left[r]}
        schedule.append(work)
        left = [n - (n > 0) for n in left]
    return schedule


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("quantizer", QUANTIZERS + PROTECTED + BLOCK_UNIT, ids=str)
def test_equals_dense_attention_over_stored_values(quantizer: object, layer: str, deterministic: bool) -> None:
    lengths = [37, 5, 90, 70]
    paged = Paged(shape(**LAYERS[layer]), quantizer, lengths, deterministic=deterministic)
    for r, out in enumerate(paged.run(mixed(lengths, 33))):
        close(out, paged.expected(r))


@pytest.mark.parametrize("bits", [3, 2])
def test_odd_widths_need_head_dims_they_pack_into(bits: int) -> None:
    quantizer = {"name": "rotated", "bits": bits, "group": 32}
    paged = Paged(shape(Dk=48, Dv=80, softcap=3.0, sink_logits=True), quantizer, [60])
    close(paged.run([{0: 50}, {0: 9}, {0: 1}])[0], paged.expected(0))
    refusal = paged.backend.supports(*paged.quantizer.formats(0)[0][1:], shape(Dk=12 if bits == 3 else 6), 8, CPU)
    assert refusal is not None
    assert "multiple of" in refusal


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("length", range(16, 33))
def test_every_residue_of_length_modulo_block_size(length: int, deterministic: bool) -> None:
    paged = Paged(shape(), "int8_token", [length], block_size=16, deterministic=deterministic)
    close(paged.run([{0: length - 1}, {0: 1}])[0], paged.expected(0))


@given(data=st.data())
@settings(max_examples=40)
def test_any_layer_any_schedule(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=4))
    paged = Paged(
        data.draw(any_shape(2, 10, 40)),
        data.draw(st.sampled_from(QUANTIZERS + BLOCK_UNIT[:1])),
        lengths,
        block_size=data.draw(st.sampled_from([1, 3, 8, 16, 100])),
        deterministic=data.draw(st.booleans()),
        block_seed=data.draw(st.integers(0, 99)),
    )
    for r, out in enumerate(paged.run(mixed(lengths, data.draw(st.integers(1, 40))))):
        close(out, paged.expected(r))


@pytest.mark.parametrize("quantizer", QUANTIZERS + PROTECTED + BLOCK_UNIT, ids=str)
@pytest.mark.parametrize("layer", ["gqa3", "all"])
def test_deterministic_results_do_not_depend_on_the_schedule(quantizer: object, layer: str) -> None:
    lengths = [70, 9, 140]
    base = Paged(shape(**LAYERS[layer]), quantizer, lengths, deterministic=True).run(mixed(lengths, 512))
    alone = [{r: n} for r, n in enumerate(lengths)]
    token_by_token = [{r: 1 for r, n in enumerate(lengths) if n > i} for i in range(max(lengths))]
    for block_size in (8, 16, 32):
        if quantizer in BLOCK_UNIT:
            base = Paged(shape(**LAYERS[layer]), quantizer, lengths, block_size, deterministic=True).run(mixed(lengths, 512))
        for schedule in (alone, token_by_token, mixed(lengths, 13), mixed(lengths, 64)):
            paged = Paged(
                shape(**LAYERS[layer]), quantizer, lengths, block_size, deterministic=True, block_seed=block_size, free_blocks=40
            )
            for got, want in zip(paged.run(schedule), base, strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_deterministic_in_every_compute_dtype(dtype: torch.dtype) -> None:
    outs = []
    for schedule in ([{0: 77}], [{0: 30}, {0: 1}, {0: 46}]):
        outs.append(Paged(shape(), "none", [77], dtype=dtype, deterministic=True).run(schedule)[0])
    assert torch.equal(*outs)
    assert outs[0].dtype == dtype


@pytest.mark.parametrize("layer", LAYERS)
def test_raw_reads_see_this_calls_tokens_unquantized_and_earlier_ones_stored(layer: str) -> None:
    paged = Paged(shape(**LAYERS[layer]), "int8_token", [50], reads="raw")
    out = paged.run([{0: 31}, {0: 18}, {0: 1}])[0]
    q, k, v = (x.double() for x in paged.data[0])
    stored = paged.stored(0)
    for first, last in ((0, 31), (31, 49), (49, 50)):
        now = torch.arange(50)[:, None, None] >= first
        want = dense(q, torch.where(now, k, stored["k"]), torch.where(now, v, stored["v"]), paged.layer, paged.sink_logits)
        close(out[first:last], want[first:last])


def test_cache_reads_differ_from_raw_reads() -> None:
    cache, raw = (Paged(shape(), "int8_token", [40], reads=reads).run([{0: 40}])[0] for reads in ("cache", "raw"))
    assert 1e-5 < (cache - raw).abs().max() < 0.1


def test_long_prefills_and_large_batches_are_split_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in ("gqa3", "all"):
        want = Paged(shape(**LAYERS[layer]), "int8", [90, 60, 5]).run(mixed([90, 60, 5], 50))
        with monkeypatch.context() as patch:
            patch.setattr(module, "QUERY_ROWS", 7)
            patch.setattr(module, "COHORT_ELEMENTS", 10_000)
            got = Paged(shape(**LAYERS[layer]), "int8", [90, 60, 5]).run(mixed([90, 60, 5], 50))
        for a, b in zip(got, want, strict=True):
            close(a, b.double(), 1e-5)


def test_a_window_never_reads_blocks_behind_it() -> None:
    """Blocks behind the window may belong to another request by then."""
    paged = Paged(shape(window=10), "int8_token", [60])
    paged.step({0: 59})
    paged.store.poison_blocks(paged.tables[0][:6])  # positions 0 to 47; the last token sees 50 to 59
    close(paged.step({0: 1})[0], paged.expected(0)[59:])


def test_head_ranges_of_different_formats_share_a_layer() -> None:
    """A quantizer may store some heads raw, such as protected ones."""

    class Mixed(NoneQuantizer):
        def formats(self, layer: int) -> list[HeadFormat]:
            raw = super().formats(layer)[0].k
            half = raw.__class__(bits=16, storage=torch.float16)
            return [HeadFormat(range(1), half, raw), HeadFormat(range(1, 3), raw, half)]

    layer = LayerShape(index=0, H=3, Hq=6, Dk=16, Dv=16, scaling=0.25, sink_logits=True)
    paged = Paged(layer, Mixed(), [45])
    close(paged.run([{0: 30}, {0: 15}])[0], paged.expected(0))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_call_of_nothing_but_padding_returns_zeros_and_writes_nothing(deterministic: bool) -> None:
    paged = Paged(shape(), "int8_token", [8], deterministic=deterministic)
    before = [t.view(torch.uint8).clone() for t in paged.store.planes(0)[0].tensors]
    none, rows = torch.zeros(0, dtype=torch.int32), torch.full((2, 4, 16), torch.nan)
    meta = AttentionMetadata(none.view(0, 1), none, torch.zeros(1), torch.full((2,), -1), torch.zeros(2).long(), [], [0], 0, 8)
    assert not paged.backend.attend(0, rows, rows[:, :2], rows[:, :2], meta).any()
    assert all(torch.equal(t.view(torch.uint8), b) for t, b in zip(paged.store.planes(0)[0].tensors, before, strict=True))


def test_bfloat16_queries_are_attended_in_float32() -> None:
    paged = Paged(shape(), "int8", [64], dtype=torch.bfloat16)
    out, want = paged.run([{0: 64}])[0], paged.expected(0)
    assert out.dtype == torch.bfloat16
    assert (out.double() - want).abs().max() <= want.abs().max() * 2**-8


def test_planes_with_padded_pages_are_read_by_their_strides() -> None:
    paged = Paged(shape(), "int8_token", [30])
    want = paged.run([{0: 30}])[0]
    other = Paged(shape(), "int8_token", [30])

    def padded(plane: Plane) -> Plane:
        codes, scale = (torch.cat([t, t, t], 1)[:, : t.shape[1]] for t in plane.pool)  # a page is followed by a gap
        return plane._replace(codes=codes, scale=scale)

    (planes,) = other.backend._planes[0]
    other.backend._planes[0] = [planes._replace(k=padded(planes.k), v=padded(planes.v))]
    assert torch.equal(other.run([{0: 30}])[0], want)
