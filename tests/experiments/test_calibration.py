"""Calibration in memory: the statistics are those of the keys and values the model really produced."""

from collections.abc import Iterator

import pytest
import torch

from calibration.fitting.collect import FULL, Collector, absmax_scales
from calibration.fitting.ranges import percentile, seen
from qkv.engine import Engine
from qkv.errors import ConfigError, ScaleError
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer.base import QUANTIZERS

TEXTS = [[7, 8, 9, 10, 11, 300], [40, 41, 42]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("llama3-8b-tiny")


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    with Engine.create(model=loaded, num_blocks=64, enable_prefix_caching=False) as built:
        yield built


def test_statistics_do_not_depend_on_how_tokens_come(engine: Engine) -> None:
    names = ["k_channel_absmax", "k_channel_max", "k_channel_min", "k_head_absmax", "v_head_absmax"]
    q, k, v = (torch.randn(20, 2, 16) for _ in range(3))
    whole, pieces = Collector(names), Collector(names)
    whole(0, q, k, v)
    for part in (slice(0, 3), slice(3, 3), slice(3, 20)):
        pieces(0, q[part], k[part], v[part])
    assert {n: s.shape for n, s in whole.stats[0].items()} == {
        "k_channel_absmax": (2, 16),
        "k_channel_max": (2, 16),
        "k_channel_min": (2, 16),
        "k_head_absmax": (2,),
        "v_head_absmax": (2,),
    }
    for name in names:
        assert torch.equal(whole.stats[0][name], pieces.stats[0][name])
    assert torch.equal(whole.stats[0]["k_channel_absmax"], k.abs().amax(0))
    assert torch.equal(whole.stats[0]["v_head_absmax"], v.abs().amax((0, 2)))


def test_scales_come_from_the_keys_the_model_produced(engine: Engine) -> None:
    seen: dict[int, torch.Tensor] = {}

    def observe(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        top = k.abs().amax(0)
        seen[layer] = torch.maximum(seen[layer], top) if layer in seen else top

    with engine.observe(observe):
        engine.score(TEXTS)
    done: list[tuple[int, int]] = []
    file = absmax_scales(engine, TEXTS, QUANTIZERS.build("int8"), progress=lambda i, n: done.append((i, n)))
    assert done == [(1, 2), (2, 2)]
    assert set(file.tensors) == {f"layers.{i}.k_scale" for i in range(3)}
    for layer in range(3):
        # Scoring does not feed the last token of a list, generating does: scales can only be larger.
        assert bool((file.tensors[f"layers.{layer}.k_scale"] >= seen[layer] / 127 - 1e-7).all())
    assert file.metadata["tokens"] == 9
    assert file.metadata["documents"] == 2
    file.validate(engine.layers, "int8", engine.loaded.fingerprint, QUANTIZERS.build("int8").static_tensors())
    (warning,) = file.warnings
    assert warning.startswith("the scales come from 9 tokens"), "the only thing to say against them"


@pytest.mark.parametrize("spec", ["fp8", "int8", {"name": "int8", "zero_point": True}])
def test_an_engine_runs_on_what_calibration_gives(engine: Engine, loaded: LoadedModel, spec: str | dict[str, object]) -> None:
    scales = absmax_scales(engine, TEXTS, QUANTIZERS.build(spec))
    with Engine.create(model=loaded, quantizer=spec, scales=scales, num_blocks=64) as quantized:
        (score,) = quantized.score([TEXTS[0]])
    (exact,) = engine.score([TEXTS[0]])
    assert torch.allclose(score.logprobs, exact.logprobs, atol=0.5)


@pytest.mark.parametrize("nothing", [[], [[]], [[], []]])
def test_no_tokens_are_refused(engine: Engine, nothing: list[list[int]]) -> None:
    with pytest.raises(ScaleError, match="no tokens"):
        absmax_scales(engine, nothing, QUANTIZERS.build("int8"))


def test_a_layer_that_was_never_reached_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Collector.__call__

    def deaf(self: Collector, layer: int, *qkv: torch.Tensor) -> None:
        if layer != 1:
            original(self, layer, *qkv)

    monkeypatch.setattr(Collector, "__call__", deaf)
    with pytest.raises(ScaleError, match="layer 1 was never reached"):
        absmax_scales(engine, TEXTS, QUANTIZERS.build("int8"))


def test_values_that_are_not_finite_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Collector.__call__
    monkeypatch.setattr(Collector, "__call__", lambda self, layer, q, k, v: original(self, layer, q, k * float("inf"), v))
    with pytest.raises(ScaleError, match="layer 0: k_channel_absmax is not finite"):
        absmax_scales(engine, TEXTS, QUANTIZERS.build("int8"))


def test_a_statistic_nobody_collects_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot collect k_median; it collects: k_body_max, k_body_min, k_channel_absmax"):
        Collector(["k_median"])


def test_sinks_and_body_are_kept_apart_however_a_document_is_chunked() -> None:
    names = ["k_body_max", "k_body_min", "k_sink_max", "k_sink_min", "k_histogram"]
    documents = [torch.randn(n, 2, 16) for n in (20, 2, 9)]
    whole, pieces = Collector(names, sink_tokens=4), Collector(names, sink_tokens=4)
    for x in documents:
        whole.begin()
        whole(0, x, x, x)
        pieces.begin()
        for part in (slice(0, 3), slice(3, 7), slice(7, None)):
            pieces(0, x[part], x[part], x[part])
    for name in names:
        assert torch.equal(whole.stats[0][name], pieces.stats[0][name]), name
    assert torch.equal(whole.stats[0]["k_body_max"], torch.cat([x[4:] for x in documents]).amax(0))
    assert torch.equal(whole.stats[0]["k_sink_max"][1], torch.stack([x[1] for x in documents]).amax(0))
    assert torch.equal(whole.stats[0]["k_sink_min"][3], torch.stack([x[3] for x in documents if len(x) > 3]).amin(0))
    assert whole.stats[0]["k_histogram"].sum(-1).eq(16 + 5).all()
    skipped = Collector(["k_channel_max"], skip=4)
    for x in documents:
        skipped.begin()
        skipped(0, x[:3], x[:3], x[:3])
        skipped(0, x[3:], x[3:], x[3:])
    assert torch.equal(skipped.stats[0]["k_channel_max"], whole.stats[0]["k_body_max"])


def test_ranges_leave_out_what_the_quantizer_keeps_raw() -> None:
    x = torch.randn(300, 1, 4)
    x[0], x[1] = 100.0, 50.0
    collector = Collector(FULL, sink_tokens=2)
    collector(0, x, x, x)
    stats = collector.stats[0]
    body = x[2:].amax(0)
    assert torch.equal(seen(stats, "k").high, torch.full((1, 4), 100.0))
    assert torch.equal(seen(stats, "k", raw=1).high, torch.full((1, 4), 50.0))
    assert torch.equal(seen(stats, "k", raw=2).high, body)
    assert torch.equal(percentile(stats, "k", 99.0).high, torch.full((1, 4), 100.0))
    assert torch.equal(percentile(stats, "k", 99.0, raw=1).high, torch.full((1, 4), 50.0))
    assert (percentile(stats, "k", 99.0, raw=2).high < body).all()
