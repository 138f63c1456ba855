"""The triton backend: what it refuses, and whole steps and engines in the interpreter."""

from typing import Any

import pytest
import torch

from qkv.attention.base import choose_backend
from qkv.attention.triton import TritonBackend
from qkv.errors import ConfigError
from qkv.layout import AttentionMetadata, HeadFormat, KVFormat
from qkv.types import SamplingParams
from qkv_kernels.reference.attend import Plane
from tests.engine.support import make, scales, tokens
from tests.kernels.paged import Paged, shape

pytest.importorskip("triton", reason="triton is not installed")
from qkv_kernels.triton import tuning
from qkv_kernels.triton.launch import Launch

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
RAW = KVFormat(32, torch.float32)
QUANTIZERS = ["none", "fp8", "int8", {"name": "int8", "zero_point": True}, "int8_token", "int4"]
QUANTIZERS += [{"name": "protected", "inner": "int8", "heads": [[0, 0]], "sink_tokens": 3, "tail_blocks": 1}]


def test_a_cpu_is_refused_with_the_reason_and_auto_goes_on() -> None:
    layer, formats = shape(), [[HeadFormat(range(2), RAW, RAW)]]
    with pytest.raises(ConfigError, match="triton cannot run this configuration: layer 0: Triton kernels need a GPU"):
        choose_backend("triton", formats, [layer], 16, CPU, True)
    assert choose_backend("auto", formats, [layer], 16, CPU, True)[0].name != "triton"


@pytest.mark.parametrize(
    ("k", "layer", "B", "reason"),
    [
        (KVFormat(64, torch.float64), {}, 16, "raw storage is float32, float16 or bfloat16"),
        (RAW, {"Dk": 20}, 16, "head dim 20 is not a multiple of 8"),
        (RAW, {"Dk": 512}, 16, "head dim 512"),
        (RAW, {"H": 1, "G": 17}, 16, "17 query heads share a kv head"),
        (RAW, {}, 512, "block_size 512 is above 256"),
        (KVFormat(4, torch.uint8, "token_group", group=16), {"Dk": 16}, 16, "scale groups of 16 channels"),
        (KVFormat(2, torch.uint8, "token_group", group=8), {"Dk": 24}, 16, "a power of two that divides 6"),
        (KVFormat(8, torch.int8, "token", sink_tokens=4), {}, 16, "K and V keep different raw rows"),
        (KVFormat(16, torch.float16, unit="block"), {}, 16, "raw formats need no tails"),
        (KVFormat(4, torch.uint8, "token", rotate=True), {}, 16, "do not rotate"),
    ],
)
def test_what_kernels_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, k: KVFormat, layer: dict[str, int], B: int, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    answer = TritonBackend().supports(k, RAW, shape(**layer), B, torch.device("cuda"))
    assert answer is not None
    assert reason in answer
    assert TritonBackend().supports(RAW, RAW, shape(), 16, torch.device("cuda")) is None


def test_old_gpus_are_refused_and_current_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, refused in (((7, 5), True), ((8, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert bool(TritonBackend().supports(RAW, RAW, shape(), 16, torch.device("cuda"))) == refused


def test_modes_of_the_reference_only_are_declined() -> None:
    backend = TritonBackend()
    assert backend.declines(torch.bfloat16, "cache", False) is None
    for settings, reason in (
        ((torch.float64, "cache", False), "do not compute in torch.float64"),
        ((torch.float32, "raw", False), "reads=raw needs the reference"),
        ((torch.float32, "cache", True), "deterministic=true needs the reference"),
    ):
        assert reason in (backend.declines(*settings) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_mixed_steps_store_the_same_bytes_and_attend_to_them(quantizer: object) -> None:
    layer = shape(H=2, G=3, Dk=24, Dv=64, window=31, sink_logits=True)
    fused, reference = (Paged(layer, quantizer, [37, 5, 70], backend=b) for b in (TritonBackend(), None))
    schedule = [{0: 33}, {1: 1, 0: 1, 2: 40}, {0: 1, 2: 1, 1: 2}]
    for got, want in zip(fused.run(schedule), reference.run(schedule), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(fused.store.planes(0), reference.store.planes(0), strict=True):
        for a, b in zip(mine.tensors, theirs.tensors, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("quantizer", "kernels"),
    [
        ("int8", ["append", "decode", "reduce", "extend"]),
        (
            {"name": "protected", "inner": "kivi", "sink_tokens": 4},
            ["keep", "seal", "decode", "reduce", "extend", "keep"],
        ),
    ],
    ids=["int8", "kivi with sinks"],
)
def test_nothing_of_a_step_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch, quantizer: object, kernels: list[str]) -> None:
    """On meta tensors, which have no numbers to read: decodes and a chunk, launched up to the launch itself."""
    layer = shape(H=2, G=4, Dk=64)
    backend, launched = TritonBackend(), []
    monkeypatch.setattr(tuning, "arch", lambda device: "sm_90")
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch.kernel.__name__.removesuffix("_kernel")))
    Paged(layer, quantizer, [40], backend=backend)  # binds it

    def meta(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    def moved(p: Plane) -> Plane:
        there: dict[str, Any] = {f: t.to("meta") for f, t in p._asdict().items() if isinstance(t, torch.Tensor)}
        return p._replace(**there)

    backend._planes = [[p._replace(k=moved(p.k), v=moved(p.v)) for p in ranges] for ranges in backend._planes]
    step = AttentionMetadata(
        block_table=meta(3, 5, of=torch.int32),
        seq_lens=meta(3, of=torch.int32),
        query_start=meta(4, of=torch.int32),
        slots=meta(22, of=torch.int64),
        positions=meta(22, of=torch.int64),
        seq_lens_list=[3000, 7, 25],
        query_start_list=[0, 1, 2, 22],
        num_decodes=2,
        block_size=8,
        tail_slots=meta(3, of=torch.int64),
        sink_slots=meta(3, of=torch.int64),
    )
    out = backend.attend(0, meta(22, 8, 64), meta(22, 2, 64), meta(22, 2, 64), step)
    assert out.shape == (22, 8, 64)
    assert launched == kernels


def test_a_custom_encoder_of_whole_blocks_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.policies.quantizer.kivi.KiviQuantizer.encode_rule", "custom")
    with pytest.raises(ConfigError, match=r"kivi encodes whole blocks in Python.*attention.backend=reference"):
        Paged(shape(Dk=32), "kivi", [20], backend=TritonBackend())


def test_a_custom_encoder_runs_in_python_and_is_read_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    from qkv.policies.quantizer.int8_token import Int8TokenQuantizer

    monkeypatch.setattr(Int8TokenQuantizer, "encode_rule", "custom")
    layer = shape()
    paged = Paged(layer, "int8_token", [20], backend=TritonBackend())
    torch.testing.assert_close(paged.run([{0: 19}, {0: 1}])[0].double(), paged.expected(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantizer", ["none", "int8", {"name": "kivi", "bits": 2}], ids=["none", "int8", "kivi2"])
def test_an_engine_generates_the_reference_s_tokens(monkeypatch: pytest.MonkeyPatch, quantizer: str | dict[str, object]) -> None:
    if isinstance(quantizer, str):
        scales(quantizer, "llama")  # calibrated on the reference
    monkeypatch.setattr(TritonBackend, "supports", lambda *_: None)
    outs = []
    for backend in ("triton", "reference"):
        with make(quantizer, backend=backend) as engine:
            assert engine.metrics()["attention"]["backend"] == backend
            outs.append([o.token_ids for o in engine.generate([tokens(1, 30), tokens(2, 9)], SamplingParams(max_tokens=4))])
    assert outs[0] == outs[1]
