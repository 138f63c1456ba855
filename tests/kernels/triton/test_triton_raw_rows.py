"""Block-unit formats, raw tails and raw sinks in the Triton kernels: the reference's bytes, and attention to what Law 2 says."""

from dataclasses import replace

import pytest
import torch

from qkv.attention.triton import TritonBackend
from qkv.layout import KVFormat
from tests.kernels.formats import Stored
from tests.kernels.paged import Paged, shape

pytest.importorskip("triton", reason="triton is not installed")
from qkv_kernels.triton import tuning

pytestmark = pytest.mark.interpreter

SCHEDULE = [{0: 33}, {1: 1, 0: 1, 2: 40}, {0: 1, 2: 1, 1: 2}, *[{0: 1, 1: 1, 2: 1}] * 2, {2: 26, 0: 1}, {1: 13}, {0: 1, 1: 1}]
LENGTHS = [40, 19, 69]


QUICK = ("4 bits", "2 bits, code zeros, three blocks of tail and sinks", "int8 of tokens in blocks", "3 bits of groups")


def kivi(bits: int, zero: str = "float", group: int = 8, **more: int) -> tuple[KVFormat, KVFormat]:
    k = KVFormat(bits, torch.uint8, "block_channel", zero=zero, unit="block", **more)  # type: ignore[arg-type]
    return k, replace(k, scale="token_group", group=group)


def twice(fmt: KVFormat, **more: object) -> tuple[KVFormat, KVFormat]:
    return replace(fmt, **more), replace(fmt, **more)  # type: ignore[arg-type]


INT8, F32 = KVFormat(8, torch.int8, "token"), torch.float32
CHANNEL4 = KVFormat(4, torch.uint8, "channel", F32, "float")
CASES: dict[str, tuple[tuple[KVFormat, KVFormat], int, dict[str, object]]] = {  # formats, block size, layer
    "4 bits": (kivi(4), 8, {}),
    "3 bits": (kivi(3), 8, {"H": 1, "G": 3, "Dk": 32}),
    "2 bits, window": (kivi(2), 16, {"window": 21}),
    "2 bits, a block of tail": (kivi(2, tail_blocks=1), 8, {"H": 1, "G": 1}),
    "4 bits, dim 24 and 80, blocks of 12": (kivi(4, group=4), 12, {"H": 1, "Dk": 24, "Dv": 80}),
    "3 bits, dim 48, blocks of 64": (kivi(3, group=2), 64, {"H": 1, "Dk": 48}),
    "2 bits, code zeros, three blocks of tail and sinks": (
        kivi(2, "code", tail_blocks=3, sink_tokens=5),
        8,
        {"sink_logits": True},
    ),
    "4 bits, symmetric": (kivi(4, "none", sink_tokens=8), 8, {"softcap": 6.0}),
    "8 bits of a block": (twice(KVFormat(8, torch.int8, "block_channel", zero="float", unit="block")), 8, {}),
    "fp8 of a block": (twice(KVFormat(8, torch.float8_e4m3fn, "block_channel", unit="block", tail_blocks=1)), 8, {}),
    "int8 of tokens with sinks": (twice(INT8, sink_tokens=3), 16, {"window": 30, "sink_logits": True}),
    "int8 of tokens in blocks": (twice(INT8, unit="block", tail_blocks=2, sink_tokens=4), 8, {"H": 1, "G": 5}),
    "static K, groups of V": (
        (
            replace(CHANNEL4, unit="block", sink_tokens=4),
            KVFormat(4, torch.uint8, "token_group", zero="float", group=8, unit="block", sink_tokens=4),
        ),
        8,
        {"H": 1, "Dk": 32},
    ),
    "static K and V with sinks": (twice(CHANNEL4, sink_tokens=33), 32, {"Dk": 32}),
    "2 bits of tokens": (twice(KVFormat(2, torch.uint8, "token", zero="float")), 8, {}),
    "3 bits of groups": (twice(KVFormat(3, torch.uint8, "token_group", zero="float", group=8)), 8, {"Dk": 64}),
}


def test_every_case_is_one_the_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for (k, v), B, layer in CASES.values():
        assert TritonBackend().supports(k, v, shape(**layer), B, torch.device("cuda")) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CASES])
def test_steps_store_the_reference_s_bytes_and_attend_to_them(name: str) -> None:
    (k, v), B, layer = CASES[name]
    runs = [
        Paged(shape(**layer), Stored(k, v), LENGTHS, B, backend=backend)  # type: ignore[arg-type]
        for backend in (TritonBackend(), None)
    ]
    got, want = (paged.run(SCHEDULE) for paged in runs)
    for r, (x, y) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(x.double(), runs[0].expected(r)[: len(x)], rtol=1e-5, atol=2e-5)
    planes = [paged.store.planes(0)[0] for paged in runs]
    for a, b in zip(*(p.tensors for p in planes), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for a, b in zip(*((*p.k.raw, *p.v.raw) for p in planes), strict=True):
        assert torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))


def test_tiles_of_many_pages_and_splits_that_read_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long decode over blocks of 8, in tiles of 32, by more programs than it has tiles."""
    monkeypatch.setattr("qkv_kernels.triton.decode.split_count", lambda *_: 5)
    paged = Paged(shape(H=1), Stored(*kivi(4, tail_blocks=1, sink_tokens=3)), [130, 3], backend=TritonBackend())
    assert tuning.decode("interpreter", None, None).keys == 32  # type: ignore[arg-type]
    for r, out in enumerate(paged.run([{0: 126, 1: 2}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {0: 1}])):
        torch.testing.assert_close(out.double(), paged.expected(r), rtol=1e-5, atol=2e-5)


def test_in_half_precision_tails_are_multiplied_as_they_are() -> None:
    (k, v), B, layer = CASES["2 bits, a block of tail"]
    paged = Paged(shape(**layer), Stored(k, v), LENGTHS, B, torch.float16, backend=TritonBackend())  # type: ignore[arg-type]
    for r, out in enumerate(paged.run(SCHEDULE[:4])):
        assert out.dtype == torch.float16
        torch.testing.assert_close(out.double(), paged.expected(r)[: len(out)], rtol=0, atol=4e-3)
