"""Formats that the quantizer reads: the reference attends to what its decode gives, and to nothing else."""

import dataclasses

import pytest
import torch

from qkv.attention.base import choose_backend
from qkv.attention.cpu import CpuBackend
from qkv.errors import ConfigError
from qkv.layout import Codes, KVFormat, Side
from qkv.policies.quantizer.int8_token import Int8TokenQuantizer
from qkv.policies.quantizer.protected import ProtectedQuantizer
from qkv_kernels.triton import spec
from tests.kernels.own_codes import Rooted, Untrue, Zeros
from tests.kernels.paged import CPU, Paged, bound, shape

LENGTHS = [45, 3, 20]
SCHEDULE = [{0: 30, 1: 2}, {0: 1, 1: 1, 2: 9}, {0: 14, 2: 10}, {2: 1}]
STORED = {
    "tokens": Rooted(),
    "tokens and sinks": Rooted(sink_tokens=3),
    "blocks": Rooted(unit="block"),
    "blocks, tail and sinks": Rooted(unit="block", tail_blocks=1, sink_tokens=2),
    "protected tokens": ProtectedQuantizer(inner=Rooted(), heads=[[0, 1]], wide="int8_token", sink_tokens=2),
    "protected tokens in blocks": ProtectedQuantizer(inner=Rooted(), heads=[[0, 0]], tail_blocks=1),
    "protected blocks": ProtectedQuantizer(inner=Rooted(unit="block"), heads=[[0, 1]], wide=Rooted(unit="block")),
}


@pytest.mark.parametrize(
    "layer", [shape(H=3), shape(H=3, Dk=24, Dv=40, window=11, softcap=5.0, sink_logits=True)], ids=["", "window"]
)
@pytest.mark.parametrize("name", STORED)
def test_attention_is_that_over_what_decode_gives(name: str, layer: object) -> None:
    """In chunks and in decoding, for several requests at once; the quantizer checks that only encoded rows reach it."""
    for deterministic in (False, True):
        paged = Paged(layer, dataclasses.replace(STORED[name]), LENGTHS, deterministic=deterministic)  # type: ignore[arg-type]
        for r, out in enumerate(paged.run(SCHEDULE)):
            torch.testing.assert_close(out.double(), paged.expected(r)[: len(out)], rtol=2e-5, atol=2e-5)


def test_with_raw_reads_a_call_sees_its_own_rows_as_they_came() -> None:
    paged = Paged(shape(), Rooted(), [20], reads="raw")
    exact = Paged(shape(), "none", [20]).run([{0: 20}])[0]
    torch.testing.assert_close(paged.run([{0: 20}])[0], exact, rtol=1e-5, atol=1e-5)


def test_a_decode_that_returns_zeros_gives_attention_over_zeros() -> None:
    out = Paged(shape(), Zeros(), [20]).run([{0: 12}, {0: 8}])[0]
    assert torch.equal(out, torch.zeros_like(out))


@dataclasses.dataclass
class Misshapen(Int8TokenQuantizer):
    name = "misshapen"

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        codes = super().encode(x, side, layer, range_index)
        return Codes(codes.data, None if codes.scale is None else codes.scale.float())


@dataclasses.dataclass
class Narrow(Rooted):
    name = "narrow"

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        return super().decode(codes, side, layer, torch.float16, range_index)


@pytest.mark.parametrize(
    ("quantizer", "message"),
    [
        (Untrue(), r"quantizer untrue, layer 0, V: decode differs by up to \d.* reading='affine'|reading is 'affine'"),
        (ProtectedQuantizer(inner=Untrue()), r"quantizer protected, layer 0, V: decode differs"),
        (
            Misshapen(),
            r"quantizer misshapen, layer 0, K: encode gives torch.float32 of shape \[4, 2\] for scale, .* torch.float16",
        ),
        (Narrow(), r"quantizer narrow, layer 0, K: decode gives torch.float16"),
    ],
)
def test_codes_that_are_not_what_the_format_says_are_refused_when_a_backend_is_bound(quantizer: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Paged(shape(), quantizer, [8])


def test_fused_backends_refuse_with_the_reason_and_allow_reference_decides() -> None:
    layer = shape(Dk=64)
    formats = [bound(Rooted(), [layer]).formats(0)]
    fmt = formats[0][0].k
    assert "the quantizer's own decode" in (CpuBackend().supports(fmt, fmt, layer, 16, CPU) or "")
    assert "the quantizer's own decode" in (spec.refusal(fmt, 64) or "")
    backend, reason = choose_backend("auto", formats, [layer], 16, CPU, allow_reference=True)
    assert backend.name == "reference"
    assert "cpu: layer 0: its codes are read by the quantizer's own decode" in reason
    with pytest.raises(ConfigError, match=r"own decode.*attention\.allow_reference is false"):
        choose_backend("auto", formats, [layer], 16, CPU, allow_reference=False)
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu cannot run this configuration.*own decode"):
        choose_backend("cpu", formats, [layer], 16, CPU, allow_reference=True)


def test_rows_that_do_not_fill_bytes_are_refused() -> None:
    odd = KVFormat(3, torch.uint8, "token", reading="quantizer")
    with pytest.raises(ConfigError, match="a row of 12 codes of 3 bits does not fill whole bytes"):
        choose_backend("reference", [[bound("none", [shape()]).formats(0)[0]._replace(k=odd)]], [shape(Dk=12)], 8, CPU, True)
