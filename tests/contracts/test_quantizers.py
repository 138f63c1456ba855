"""The laws every registered quantizer keeps. Runs over the registry's names: a new quantizer needs no edit here."""

import copy
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qkv.attention.reference import ReferenceBackend
from qkv.cache.store import KVStore, raw_slot_bytes
from qkv.errors import ConfigError, ScaleError
from qkv.layout import SIDES, STATIC_SCALES, Codes, KVFormat, LayerShape, Side, Statics
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile
from qkv_kernels.reference import codec
from qkv_kernels.reference.packing import unpack
from tests.kernels.paged import CPU, Paged, bound, shape, statistics

B = 16
LAYERS = [LayerShape(index=i, H=3, Hq=9, Dk=64, Dv=64, scaling=0.125) for i in (0, 2)]  # layer 1 has no attention
NAMES = QUANTIZERS.names()
every = pytest.mark.parametrize("name", NAMES)


class Stored(NamedTuple):
    """One side (K or V) of one head range of a bound quantizer."""

    quantizer: Quantizer
    layer: int
    range_index: int
    side: Side
    heads: range
    fmt: KVFormat
    statics: Statics

    def encode(self, x: torch.Tensor) -> Codes:
        return self.quantizer.encode(x, self.side, self.layer, self.range_index)

    def decode(self, codes: Codes, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.quantizer.decode(codes, self.side, self.layer, dtype, self.range_index)


def everything_stored(q: Quantizer, layer: int = 1) -> list[Stored]:
    return [
        Stored(q, layer, i, side, f.heads, f.of(side), s.of(side))
        for i, (f, s) in enumerate(zip(q.formats(layer), q.statics(layer), strict=True))
        for side in SIDES
    ]


def k_error(q: Quantizer, x: torch.Tensor) -> torch.Tensor:
    """The error that storing makes in K of layer 0."""
    return q.decode(q.encode(x, "k", 0), "k", 0, torch.float32) - x


def rows_of(fmt: KVFormat) -> tuple[int, ...]:
    """Leading dims of what an encode call takes: tokens, or whole blocks of tokens for block-unit formats."""
    return (2, B) if fmt.unit == "block" else (5,)


def same_bytes(a: Codes, b: Codes) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None or y is not None]
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)  # type: ignore[union-attr]


@every
def test_default_settings_work_and_unknown_ones_do_not(name: str) -> None:
    q = QUANTIZERS.build(name)
    assert q.fingerprint() == QUANTIZERS.build({"name": name}).fingerprint()
    with pytest.raises(ConfigError, match="no_such_setting"):
        QUANTIZERS.build({"name": name, "no_such_setting": 1})
    assert q.__doc__
    assert not q.__doc__.startswith(type(q).__name__ + "("), "the docstring says what is stored"


@every
def test_head_ranges_cover_the_layer_in_order(name: str) -> None:
    q = bound(name, LAYERS)
    for i, layer in enumerate(LAYERS):
        heads = [h for r in q.formats(i) for h in r.heads]
        assert heads == list(range(layer.H))
        assert len(q.statics(i)) == len(q.formats(i))
        assert q.formats(i) == q.formats(i)


@every
def test_allocated_bytes_equal_the_formula(name: str) -> None:
    q = bound(name, LAYERS)
    store = KVStore(LAYERS, [q.formats(i) for i in range(len(LAYERS))], 5, B, CPU, static_bytes=q.static_bytes())
    planes = [t for i in range(len(LAYERS)) for p in store.planes(i) for t in p.tensors]
    report = store.memory_report()
    assert report["pool_bytes"] == sum(t.nbytes for t in planes)
    declared = [4 * math.prod(t.shape_in(layer)) for layer in LAYERS for t in q.static_tensors()]
    tables = [t for i in range(len(LAYERS)) for s in SIDES if (t := q.table(i, s)) is not None]
    assert report["static_bytes"] == sum(declared) + sum({t.data_ptr(): t.nbytes for t in tables}.values())
    assert report["allocated_bytes"] == report["pool_bytes"] + report["static_bytes"] + report["tail_bytes"]
    raw = [t for i in range(len(LAYERS)) for p in store.planes(i) for t in (*p.k.raw, *p.v.raw)]
    assert report["tail_bytes"] == sum(t.nbytes for t in raw)
    assert report["tail_bytes"] == store.slots * raw_slot_bytes(LAYERS, store.formats, B, torch.float32)
    assert report["kv_bytes_per_token"] * B * 5 == report["pool_bytes"]


@every
def test_codes_have_the_shapes_and_dtypes_of_their_format(name: str) -> None:
    for stored in everything_stored(bound(name, LAYERS)):
        fmt, (scale, zero, table) = stored.fmt, stored.statics
        lead, H, D = rows_of(fmt), len(stored.heads), 64
        codes = stored.encode(torch.randn(*lead, H, D))
        assert codes.data.shape == (*lead, H, fmt.packed_dim(D))
        assert codes.data.dtype == fmt.storage
        pool = fmt.scale_shape(lead[0], H, lead[1], D) if fmt.unit == "block" else fmt.scale_shape(1, H, lead[0], D)
        assert (table is not None) == (fmt.reading == "codebook")
        if table is not None:
            assert table.shape in ((2**fmt.bits,), (H, 2**fmt.bits))
            assert (table.diff() >= 0).all(), "entries ascend"
        assert not fmt.tensor_scale or (scale is not None and not scale.dim())
        scale = None if fmt.tensor_scale else scale
        for dynamic, static, wanted in ((codes.scale, scale, fmt.scale != "none"), (codes.zero, zero, fmt.zero != "none")):
            assert (dynamic is not None) == (wanted and pool is not None)
            assert (static is not None) == (wanted and fmt.scale in STATIC_SCALES)
            if static is not None:
                assert static.shape == {"tensor": (), "head": (H,), "channel": (H, D)}[fmt.scale]
            if dynamic is not None:
                assert dynamic.dtype == fmt.scale_dtype
                assert pool is not None
                whole = fmt.scale == "block_channel"
                assert dynamic.shape == (pool if whole else (*lead, H, *pool[3:]))


@every
@given(data=st.data())
@settings(max_examples=30)
def test_finite_in_finite_out_pure_and_row_by_row(name: str, data: st.DataObject) -> None:
    """encode(x)[i] equals encode(x[i:i+1]) byte for byte: chunking, prefix hits and recomputation store the same bytes.
    Where x holds blocks, block by block."""
    for stored in everything_stored(bound(name, LAYERS)):
        elements = st.floats(-100, 100, width=32) | st.sampled_from([0.0, 1e-20, 3e4, -3e38])
        x = torch.from_numpy(
            data.draw(hnp.arrays(np.float32, (*rows_of(stored.fmt), len(stored.heads), 64), elements=elements, fill=elements))
        )
        before = x.clone()
        whole = stored.encode(x)
        assert torch.equal(x, before), "encode changed its input"
        assert same_bytes(whole, stored.encode(x)), "encode is not a function of its input"
        values = stored.decode(whole)
        assert values.isfinite().all()
        for i in range(len(x)):
            one = Codes(*(None if c is None else c[i : i + 1] for c in whole))  # type: ignore[arg-type]
            assert torch.equal(stored.decode(one)[0], values[i]), "decode of a row depends on other rows"
            assert same_bytes(one, stored.encode(x[i : i + 1]))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_zeros_stay_zeros_and_every_compute_dtype_works(name: str, dtype: torch.dtype) -> None:
    """With a static float zero point, zeros come back to within half a step."""
    for stored in everything_stored(bound(name, LAYERS, dtype)):
        scale, zero, _ = stored.statics
        x = torch.zeros(*rows_of(stored.fmt), len(stored.heads), 64, dtype=dtype)
        out = stored.decode(stored.encode(x), dtype)
        assert out.dtype == dtype
        if zero is None or scale is None:
            assert not out.any()
        else:
            assert (out.abs() <= 0.51 * scale).all()


@every
def test_decode_is_what_the_format_says(name: str) -> None:
    """Kernels read an affine format by format and statics alone, so the quantizer's own decode must agree with the codec."""
    for stored in everything_stored(bound(name, LAYERS)):
        if stored.fmt.reading == "quantizer" or codec.refusal(stored.fmt, 64):
            continue
        codes = stored.encode(torch.randn(*rows_of(stored.fmt), len(stored.heads), 64))
        assert torch.equal(stored.decode(codes), codec.decode(*codes, stored.fmt, torch.float32, *stored.statics))


@every
def test_first_tokens_that_no_range_must_hold_are_raw_in_every_format(name: str) -> None:
    q = bound(name, LAYERS)
    kept = [r.of(s).sink_tokens for i in range(len(LAYERS)) for r in q.formats(i) for s in SIDES if not r.of(s).raw]
    assert q.raw_sink_tokens() == QUANTIZERS.build(name).raw_sink_tokens() == min(kept, default=0)


@every
def test_a_quantizer_that_reads_its_codes_itself_encodes_them_itself(name: str) -> None:
    q = bound(name, LAYERS)
    if any(stored.fmt.reading == "quantizer" for stored in everything_stored(q)):
        assert q.encode_rule == "custom"


@every
def test_quantized_differs_from_raw_but_not_by_much(name: str) -> None:
    """Bit-exact output of a quantizer would mean that nothing was quantized."""
    for stored in everything_stored(bound(name, LAYERS)):
        x = torch.randn(*rows_of(stored.fmt), len(stored.heads), 64)
        error = (stored.decode(stored.encode(x)) - x).norm() / x.norm()
        if stored.fmt.raw:
            assert error == 0
        else:
            assert 0 < error < 2.0 ** (2 - min(stored.fmt.bits, 5))


@every
def test_attention_reads_what_is_stored(name: str) -> None:
    layer = LAYERS[0]
    q = bound(name, [layer])
    reason = next((r for f in q.formats(0) if (r := ReferenceBackend().supports(f.k, f.v, layer, B, CPU))), None)
    if reason:
        pytest.skip(f"the reference backend does not run this format: {reason}")
    paged = Paged(layer, name, [50], B)
    out = paged.run([{0: 37}, {0: 12}, {0: 1}])[0]
    torch.testing.assert_close(out.double(), paged.expected(0), rtol=2e-5, atol=2e-5)
    raw = Paged(layer, "none", [50], B).run([{0: 50}])[0]
    assert (name == "none") == torch.allclose(out, raw, atol=1e-5)


@every
def test_scales_are_loaded_or_it_fails(name: str) -> None:
    q = QUANTIZERS.build(name)
    if not q.observers():
        assert not q.needs_scales
        assert q.tensors_from_stats({}) == {}
        return
    x = torch.randn(50, 3, 64)
    stats = {la.index: statistics(x, x) for la in LAYERS}
    assert q.observers() <= stats[0].keys()
    scales = ScaleFile(q.tensors_from_stats(stats), {"quantizer": name, "model_fingerprint": "m"})
    scales.validate(LAYERS, name, "m", q.static_tensors())
    assert scales.warnings == []
    for tensor in scales.tensors:
        for value in (None, torch.nan, -1.0 if tensor.endswith("scale") else torch.inf):
            broken = copy.deepcopy(scales)
            if value is None:
                del broken.tensors[tensor]
            else:
                broken.tensors[tensor].flatten()[0] = value
            with pytest.raises(ScaleError, match=rf"layer {tensor.split('.')[1]}\b"):
                QUANTIZERS.build(name).bind(LAYERS, broken, torch.float32, CPU)


@every
def test_a_perturbed_scale_file_changes_the_output(name: str) -> None:
    """Both writing and reading must use the loaded scales."""
    q = bound(name, LAYERS)
    if not q.observers():
        pytest.skip("has no static scales")
    x = torch.randn(50, 3, 64)
    base = q.tensors_from_stats({la.index: statistics(x, x) for la in LAYERS})
    for tensor in base:
        if tensor.startswith("layers.2."):
            values = []
            for factor in (1.0, 1.25):
                other = QUANTIZERS.build(name)
                other.bind(LAYERS, ScaleFile(base | {tensor: base[tensor] * factor}, {"quantizer": name}), torch.float32, CPU)
                blocks = x[: 3 * B].unflatten(0, (3, B))
                values.append(
                    [
                        stored.decode(stored.encode((blocks if stored.fmt.unit == "block" else x)[..., stored.heads, :]))
                        for stored in everything_stored(other)
                    ]
                )
            assert any(not torch.equal(a, b) for a, b in zip(*values, strict=True))


@every
def test_a_quantizer_without_its_scales_says_how_to_get_them_or_warns(name: str) -> None:
    q = QUANTIZERS.build(name)
    if q.needs_scales:
        with pytest.raises(ScaleError, match=r"calibration\.run"):
            q.bind(LAYERS, None, torch.float32, CPU)
    else:
        q.bind(LAYERS, None, torch.float32, CPU)
        assert bool(q.warnings()) == bool(q.observers())


def test_fp8_without_scales_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    QUANTIZERS.build("fp8").bind(LAYERS, None, torch.float32, CPU)
    assert "1.0" in caplog.text


def test_fp8_scales_map_the_largest_value_seen_to_the_largest_code() -> None:
    x = torch.randn(50, 3, 64) * 1000
    for fmt in ("e4m3", "e5m2"):
        q = QUANTIZERS.build({"name": "fp8", "format": fmt})
        q.bind(LAYERS[:1], ScaleFile(q.tensors_from_stats({0: statistics(x, x)}), {}), torch.float32, CPU)
        codes = q.encode(x, "k", 0)
        assert codes.data.float().abs().max() == torch.finfo(codes.data.dtype).max
        torch.testing.assert_close(q.decode(codes, "k", 0, torch.float32).abs().amax((0, 2)), x.abs().amax((0, 2)))


def test_int8_zero_point_and_plain_scale_files_are_not_mixed_up() -> None:
    x = torch.randn(50, 3, 64)
    plain, with_zero = QUANTIZERS.build("int8"), QUANTIZERS.build({"name": "int8", "zero_point": True})
    stats = {la.index: statistics(x, x) for la in LAYERS}
    with pytest.raises(ScaleError, match="layer 0: the quantizer, with these settings, reads no k_zero"):
        plain.bind(LAYERS, ScaleFile(with_zero.tensors_from_stats(stats)), torch.float32, CPU)
    with pytest.raises(ScaleError, match="layer 0: k_zero is missing"):
        with_zero.bind(LAYERS, ScaleFile(plain.tensors_from_stats(stats)), torch.float32, CPU)


def test_int8_zero_point_pays_off_on_channels_with_an_offset() -> None:
    x = torch.randn(200, 3, 64) + torch.linspace(-20, 20, 64)
    errors = []
    for zero_point in (False, True):
        q = QUANTIZERS.build({"name": "int8", "zero_point": zero_point})
        q.bind(LAYERS[:1], ScaleFile(q.tensors_from_stats({0: statistics(x, x)})), torch.float32, CPU)
        error = k_error(q, x)
        scale = q.statics(0)[0].k.scale
        assert scale is not None
        assert (error.abs() <= scale * 0.501).all(), "what calibration saw is never clipped"
        errors.append(error.square().mean())
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("spec", ["int8", {"name": "int8", "zero_point": True}, "int4"], ids=str)
def test_static_ranges_reach_from_the_lowest_code_to_the_highest(spec: Any) -> None:
    x = torch.randn(200, 3, 64) + torch.linspace(-20, 20, 64)
    q = QUANTIZERS.build(spec)
    q.bind(LAYERS[:1], ScaleFile(q.tensors_from_stats({0: statistics(x, x)})), torch.float32, CPU)
    data, bits = q.encode(x, "k", 0).data, q.formats(0)[0].k.bits
    codes = data if bits == 8 else unpack(data, bits).int() - 2 ** (bits - 1)
    if q.formats(0)[0].k.zero == "none":
        assert (codes.abs().amax(0) == 127).all()
    else:
        assert (codes.amin(0) == -(2 ** (bits - 1))).all()
        assert (codes.amax(0) == 2 ** (bits - 1) - 1).all()


def test_rotation_spreads_a_channel_that_is_twenty_times_larger() -> None:
    """Against the same format without its rotation."""
    k = torch.randn(300, 3, 64)
    k[:, :, 17] *= 20
    q = bound("rotated", LAYERS)
    plain = replace(q.formats(0)[0].k, rotate=False)
    unrotated = codec.decode(*codec.encode(k, plain), plain, torch.float32) - k
    assert k_error(q, k).square().mean() < unrotated.square().mean() / 2


def test_one_outlier_channel_costs_per_token_scales_their_quality_and_per_channel_scales_nothing() -> None:
    """Qwen2's K biases: one channel 100 times the others. Judged on the ordinary channels, in decibels."""
    k = torch.randn(300, 3, 64)
    k[:, :, 17] *= 100
    ordinary = [c for c in range(64) if c != 17]

    def sqnr(name: str) -> float:
        q = QUANTIZERS.build(name)
        scales = ScaleFile(q.tensors_from_stats({0: statistics(k, k)})) if q.needs_scales else None
        q.bind(LAYERS[:1], scales, torch.float32, CPU)
        x = k.unflatten(0, (-1, 20)) if q.formats(0)[0].k.unit == "block" else k
        error = k_error(q, x)
        return float(10 * torch.log10(x[..., ordinary].square().mean() / error[..., ordinary].square().mean()))

    assert sqnr("int8") > 35
    assert sqnr("int8_token") < 25
    assert sqnr("int4") > 15
    assert sqnr("kivi") > 15
    assert sqnr("rotated") < 10, "rotation spreads the outlier over its row: the others pay"


def test_reference_backend_says_what_it_does_not_run() -> None:
    token = KVFormat(bits=8, storage=torch.int8, scale="token")
    odd = KVFormat(bits=3, storage=torch.uint8, scale="token")
    backend = ReferenceBackend()
    assert backend.supports(token, token, shape(), B, CPU) is None
    assert "multiple of 8" in (backend.supports(odd, token, shape(Dk=12), B, CPU) or "")
    assert "multiple of 8" in (backend.supports(token, odd, shape(Dk=12), B, CPU) or "")


def protected(**fields: object) -> Quantizer:
    return bound({"name": "protected", **fields}, LAYERS)


def test_protected_layers_and_heads_are_stored_in_the_wide_formats_and_the_rest_as_inner_stores_it() -> None:
    q, inner = protected(inner="int4", layers=[-1], heads=[[0, 1]]), bound("int4", LAYERS)
    assert [list(f.heads) for f in q.formats(0)] == [[0], [1], [2]]
    assert [f.k.raw for f in q.formats(0)] == [False, True, False]
    assert [f.k.raw for f in q.formats(1)] == [True]
    x = torch.randn(5, 3, 64)
    for stored in everything_stored(q, layer=0):
        mine = slice(stored.heads.start, stored.heads.stop)
        codes, whole = stored.encode(x[:, mine]), inner.encode(x, stored.side, 0)
        if stored.fmt.raw:
            assert torch.equal(codes.data, x[:, mine])
            continue
        for got, want in zip(codes, whole, strict=True):
            assert (got is None) == (want is None)
            assert got is None or torch.equal(got, want[:, mine])  # type: ignore[index]
        assert torch.equal(stored.decode(codes), inner.decode(whole, stored.side, 0, torch.float32)[:, mine])


@pytest.mark.parametrize("inner", ["int8_token", "rotated", "kivi"])
def test_protected_single_heads_of_any_inner_format(inner: str) -> None:
    """Scales per token, per group of channels and per block are all cut at the right heads."""
    q, alone = protected(inner=inner, heads=[[0, 0]], wide="int8_token", tail_blocks=0), bound(inner, LAYERS)
    x = torch.randn(2, B, 3, 64)
    flat = alone.formats(0)[0].k.unit == "token"
    whole = alone.decode(alone.encode(x.flatten(0, 1) if flat else x, "k", 0), "k", 0, torch.float32).view_as(x)
    codes = q.encode(x[..., 1:, :], "k", 0, 1)
    assert torch.equal(q.decode(codes, "k", 0, torch.float32, 1), whole[..., 1:, :])
    assert q.formats(0)[1].k.unit == "block"


def test_protected_takes_after_what_it_wraps() -> None:
    assert not QUANTIZERS.build({"name": "protected", "inner": "kivi"}).needs_scales
    assert QUANTIZERS.build({"name": "protected", "inner": "int4"}).needs_scales
    assert protected(inner={"name": "kivi", "tail_blocks": 2}, tail_blocks=1).formats(0)[0].k.tail_blocks == 2
    assert protected(inner={"name": "protected", "inner": "int8_token", "sink_tokens": 6}).formats(0)[0].k.sink_tokens == 6
    fmt = protected(inner={"name": "kivi", "tail_blocks": 2}).formats(0)[0].k
    assert (fmt.unit, fmt.tail_blocks, fmt.sink_tokens) == ("block", 2, 4)
    assert protected(inner="int8").formats(0)[0].k.unit == "token"
    assert protected(inner="int8", tail_blocks=1).formats(0)[0].k.unit == "block"
    assert protected(inner="int4", heads=[[1, 0], [1, 1]]).formats(1)[0].heads == range(2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": [2]}, "-2 to 1"),
        ({"heads": [[0, 3]]}, "0 to 2"),
        ({"heads": [[0]]}, "pairs"),
        ({"wide": "int8"}, "needs no scales"),
        ({"inner": "int44"}, "did you mean 'int4'"),
        ({"sink_tokens": -1}, "0 to 256"),
    ],
)
def test_protected_says_what_it_cannot_protect(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        protected(**fields)


@pytest.mark.parametrize("quantizer", ["rotated", "kivi"])
def test_error_rises_as_bits_fall(quantizer: str) -> None:
    """The mean square error rises by a factor near 4 per bit; if it were much less, something would not be quantized."""
    x = torch.randn(4, B, 3, 64)
    errors = []
    for bits in (4, 3, 2):
        q = bound({"name": quantizer, "bits": bits}, LAYERS)
        rows = x if q.formats(0)[0].k.unit == "block" else x.flatten(0, 1)
        errors.append(float(k_error(q, rows).square().mean()))
    assert 3 < errors[1] / errors[0] < 7
    assert 3 < errors[2] / errors[1] < 7


@pytest.mark.parametrize("name", ["int4", "kivi", "rotated"])
def test_activations_of_1e5_fit_float16_scales(name: str) -> None:
    q = bound(name, LAYERS, scale=1e5)
    x = torch.randn(2, B, 3, 64) * 1e5
    rows = x if q.formats(0)[0].k.unit == "block" else x.flatten(0, 1)
    for side in SIDES:
        out = q.decode(q.encode(rows, side, 0), side, 0, torch.float32)
        assert out.isfinite().all()
        assert (out - rows).norm() / rows.norm() < 0.2
