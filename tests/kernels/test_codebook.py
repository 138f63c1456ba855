"""Codebook formats: the nearest entry, the scales that formats imply, and attention over them on the reference backend."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.attention.base import choose_backend
from qkv.errors import ConfigError
from qkv.layout import HeadFormat, HeadStatics, KVFormat, LayerShape, ScaleKind, Statics
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer._fp4 import E2M1
from qkv.policies.quantizer._normal import lloyd_max
from qkv.policies.quantizer.base import QUANTIZERS
from qkv_kernels.reference import codec
from tests.kernels.paged import CPU, Paged, bound, shape

TOKEN = KVFormat(4, torch.uint8, "token", reading="codebook")
TABLES = {4: torch.tensor(E2M1), 3: torch.tensor(lloyd_max(8)), 2: torch.tensor([0.0, 0.1, 0.4, 1.0])}
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu)


@dataclass
class Tabled(AffineQuantizer):
    """K and V in one codebook format; `heads` times the table, each a little wider, where it is not 0."""

    fmt: KVFormat = field(default_factory=lambda: TOKEN)
    heads: int = 0

    name = "tabled"
    encode_rule = "absmax"

    def formats(self, layer: int) -> list[HeadFormat]:
        return self.whole(layer, self.fmt, self.fmt)

    def statics(self, layer: int) -> list[HeadStatics]:
        table = TABLES[self.fmt.bits]
        if self.heads:
            table = table * torch.linspace(1, 1.5, self.heads)[:, None]
        side = Statics(torch.tensor(0.37) if self.fmt.tensor_scale else None, None, table)
        return [HeadStatics(side, side)]


def test_entries_for_the_normal_distribution_are_those_of_the_literature_and_so_is_their_error() -> None:
    known = {2: [0.7979], 4: [0.4528, 1.5104], 8: [0.2451, 0.7560, 1.3439, 2.1519]}
    known[16] = [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326]
    x = torch.randn(2000, 1, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for (entries, positive), error in zip(known.items(), (0.3634, 0.1175, 0.0345, 0.0095), strict=True):
        table = lloyd_max(entries)
        assert table == pytest.approx([*(-c for c in reversed(positive)), *positive], abs=6e-5)
        values = torch.tensor(table, dtype=torch.float64)[codec.nearest(x, torch.tensor(table)).long()]
        assert float((values - x).square().mean() / x.square().mean()) == pytest.approx(error, rel=0.02)


@given(st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=16, unique=True), st.floats(-6, 6, width=32))
def test_codes_are_the_nearest_entry_and_the_lower_one_of_two(entries: list[float], x: float) -> None:
    table = torch.tensor(sorted(entries))
    middles = (table[1:] + table[:-1]) / 2
    for value in (torch.tensor(x), *middles):
        code = int(codec.nearest(value.view(1, 1), table))
        distance = (table.double() - value.double()).abs()
        assert distance[code] <= distance.min() + 1e-6
    for i, middle in enumerate(middles):
        assert int(codec.nearest(middle.view(1, 1), table)) <= i or table[i] == middle


def test_e2m1_numbers_times_the_scale_are_stored_exactly() -> None:
    x = torch.tensor(E2M1) * torch.tensor([0.25, 3.0, 448.0])[:, None, None]
    for scale in (torch.float16, torch.float8_e4m3fn):
        fmt = dataclasses.replace(TOKEN, scale_dtype=scale)
        codes = codec.encode(x, fmt, table=TABLES[4])
        assert torch.equal(codec.decode(*codes, fmt, torch.float32, table=TABLES[4]), x)


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("scale", ["token", "token_group", "block_channel"])
def test_every_element_is_within_half_a_gap_of_its_entry(scale: ScaleKind, dtype: torch.dtype) -> None:
    """Codes come from the scale as stored; only what a rounded-down scale leaves outside the table is further away."""
    table, D = TABLES[3], 32
    block = scale == "block_channel"
    fmt = KVFormat(
        3, torch.uint8, scale, dtype, group=8 if scale == "token_group" else None, unit="block" if block else "token",
        reading="codebook",
    )  # fmt: skip
    x = torch.randn(*((3, 16) if block else (20,)), 2, D)
    data, s, z = codec.encode(x, fmt, table=table)
    assert z is None
    assert s is not None
    assert s.dtype == dtype
    step = codec._spread(s.float(), fmt, x)
    inside = x.abs() <= step * table[-1]
    assert inside.float().mean() > 0.8
    error = (codec.decode(data, s, z, fmt, torch.float32, table=table) - x).abs()
    assert (error <= step * table.diff().max() / 2 * 1.0001)[inside].all()


CASES: dict[str, tuple[KVFormat, dict[str, Any]]] = {
    "token": (TOKEN, {}),
    "per head": (TOKEN, {"heads": 2}),
    "rotated, zero": (KVFormat(3, torch.uint8, "token", zero="float", rotate=True, reading="codebook"), {}),
    "groups, e4m3, tensor": (
        KVFormat(4, torch.uint8, "token_group", torch.float8_e4m3fn, group=8, reading="codebook", tensor_scale=True),
        {"heads": 2},
    ),
    "groups, e8m0, sinks": (
        KVFormat(4, torch.uint8, "token_group", torch.float8_e8m0fnu, group=8, reading="codebook", sink_tokens=3), {}
    ),
    "blocks, 2 bits, zero": (
        KVFormat(2, torch.uint8, "block_channel", torch.bfloat16, zero="float", unit="block", reading="codebook"), {}
    ),
    "blocks of heads": (KVFormat(3, torch.uint8, "block_channel", unit="block", reading="codebook"), {"heads": 2}),
    "no scale": (KVFormat(4, torch.uint8, "none", reading="codebook"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_over_codebooks_is_that_over_what_they_stand_for(name: str, deterministic: bool) -> None:
    fmt, more = CASES[name]
    layer: LayerShape = shape(Dk=32, window=17)
    paged = Paged(layer, Tabled(fmt=fmt, **more), [45, 3], deterministic=deterministic)
    for r, out in enumerate(paged.run([{0: 30, 1: 2}, {0: 1, 1: 1}, {0: 14}])):
        torch.testing.assert_close(out.double(), paged.expected(r)[: len(out)], rtol=2e-5, atol=2e-5)


def test_fused_backends_refuse_codebooks_with_the_reason() -> None:
    formats = [bound("turboquant", [shape(Dk=64)]).formats(0)]
    with pytest.raises(ConfigError, match=r"cpu: layer 0: its codes are read from a codebook, which only the reference"):
        choose_backend("auto", formats, [shape(Dk=64)], 16, CPU, allow_reference=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 8, "storage": torch.int8}, "got 8 bits"),
        ({"bits": 4, "storage": torch.uint8, "scale": "token", "zero": "code"}, "zero='code'"),
        ({"bits": 4, "storage": torch.uint8, "scale": "head"}, "scale='head'"),
    ],
)
def test_senseless_codebook_formats_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVFormat(**fields, reading="codebook")
    with pytest.raises(ValueError, match="tensor_scale goes with"):
        KVFormat(4, torch.uint8, "token", tensor_scale=True)


@pytest.mark.parametrize("preset", ["k8v4", "4bit", "k3v4", "3bit"])
def test_presets_of_turboquant_store_and_attend_at_their_bits(preset: Any) -> None:
    layer = shape(Dk=64)
    paged = Paged(layer, {"name": "turboquant", "preset": preset}, [20])
    torch.testing.assert_close(paged.run([{0: 19}, {0: 1}])[0].double(), paged.expected(0), rtol=2e-5, atol=2e-5)
    memory = paged.store.memory_report()
    k_bits, v_bits = {"k8v4": (8, 4.5), "4bit": (4.25, 4.5), "k3v4": (3.25, 4.5), "3bit": (3.25, 3.5)}[preset]
    assert (memory["effective_bits_k"], memory["effective_bits_v"]) == (k_bits, v_bits)
    rotated = Paged(layer, {"name": "turboquant", "preset": preset, "rotate_values": True}, [20])
    torch.testing.assert_close(rotated.run([{0: 20}])[0].double(), rotated.expected(0), rtol=2e-5, atol=2e-5)
    assert rotated.store.memory_report()["effective_bits_v"] == v_bits - 0.25


def test_a_protected_codebook_is_read_at_the_right_heads() -> None:
    inner = {"name": "nvfp4", "search": False}
    spec = {"name": "protected", "inner": inner, "wide": "turboquant", "heads": [[0, 1]], "sink_tokens": 2, "tail_blocks": 0}
    paged = Paged(shape(H=3, Dk=32), spec, [45])
    out = paged.run([{0: 30}, {0: 15}])[0]
    torch.testing.assert_close(out.double(), paged.expected(0), rtol=2e-5, atol=2e-5)


def stored(spec: Any, x: torch.Tensor) -> torch.Tensor:
    """What K rows x [T, H, D] are read as."""
    q = QUANTIZERS.build(spec)
    q.bind([LayerShape(0, x.shape[1], x.shape[1], x.shape[2], x.shape[2], 1.0)], None, torch.float32, CPU)
    return q.decode(q.encode(x, "k", 0), "k", 0, torch.float32)


@pytest.mark.parametrize(("preset", "error"), [("4bit", 0.0095), ("3bit", 0.0345)])
def test_turboquant_has_the_error_of_its_table_whatever_the_rows_are_like(preset: str, error: float) -> None:
    x = torch.randn(500, 2, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 500)[:, None, None]
    for norm_correction in (False, True):
        out = stored({"name": "turboquant", "preset": preset, "norm_correction": norm_correction}, x)
        relative = (out - x).square().sum(-1) / x.square().sum(-1)
        assert float(relative.mean()) == pytest.approx(error, rel=0.02)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=1e-6)


def test_nvfp4_and_mxfp4_scales_are_those_of_their_standards() -> None:
    x = torch.zeros(2, 1, 32)
    x[0, 0, :4] = torch.tensor([6.0, -3.0, 0.5, 0.2])  # scale 1: all but the last are numbers of E2M1
    x[1, 0, :4] = torch.tensor([7.9, 1.0, -3.0, 100.0])
    out = stored({"name": "nvfp4", "search": False}, x)
    assert out[0, 0, :4].tolist() == [6.0, -3.0, 0.5, 0.0]
    assert float(out[1, 0, 3]) == 6 * 16  # 100 / 6 rounds to 16 in e4m3
    out = stored("mxfp4", x)
    assert out[0, 0, :4].tolist() == [6.0, -3.0, 0.5, 0.0]
    assert out[1, 0, :4].tolist() == [8.0, 0.0, 0.0, 96.0]  # scale 2 ^ (6 - 2) = 16, of which 100 is more than 6 times


def test_the_search_of_nvfp4_never_costs_accuracy_and_pays_on_normal_data() -> None:
    x = torch.randn(300, 2, 64, generator=torch.Generator().manual_seed(2))
    errors = [(stored({"name": "nvfp4", "search": s}, x) - x).square().unflatten(-1, (-1, 16)).sum(-1) for s in (False, True)]
    assert (errors[1] <= errors[0] * 1.0001).all()
    assert errors[1].sum() < 0.95 * errors[0].sum()


def test_fp8_of_tokens_needs_no_calibration_for_any_magnitude() -> None:
    x = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 4, 100)[:, None, None]
    error = (stored("fp8_token", x) - x).norm(dim=-1) / x.norm(dim=-1)
    assert error.max() < 0.04
    assert (stored("fp8", x) - x)[-1].abs().max() > 1000, "with scales of 1.0 large rows saturate"
