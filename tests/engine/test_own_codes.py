"""Quantizers that read their codes themselves, end to end: schedules, swap, prefix sharing, calibration, and wrong decodes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from calibration.fitting import search
from calibration.fitting.collect import absmax_scales
from calibration.fitting.fit import fit
from calibration.fitting.statistics import Statistics
from qkv.errors import ConfigError, ScaleError
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile, StaticTensor
from qkv.types import SamplingParams
from tests.engine.support import keep_stored, make, model, tokens
from tests.kernels.own_codes import Rooted, Spread, Untrue, Zeros

PREFIX = tokens(1, 48)
PROMPTS = [PREFIX + tokens(10 + i, n) for i, n in enumerate((30, 9, 17))]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=3)
ROOTED: dict[str, dict[str, Any]] = {"tokens": {}, "blocks": {"unit": "block"}, "sinks": {"sink_tokens": 4}}
ENCODED_IN_PYTHON = [name for name in QUANTIZERS.names() if QUANTIZERS.get(name).encode_rule == "custom"]
SPECS: dict[str, dict[str, Any]] = {name: {"name": "rooted", **fields} for name, fields in ROOTED.items()} | {
    name: {"name": name} for name in ENCODED_IN_PYTHON
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    QUANTIZERS.names()
    for quantizer in (Rooted, Spread, Untrue, Zeros):
        monkeypatch.setitem(QUANTIZERS._classes, quantizer.name, quantizer)


def logits(quantizer: str, **kw: Any) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    with make(quantizer, 8, deterministic=True, **kw) as e:
        e.score([PROMPTS[0]], on_logits=lambda _i, _s, x: rows.append(x.clone()))
        assert e.metrics()["attention"]["backend"] == ("cpu" if quantizer == "none" else "reference")
    return torch.cat(rows)


def kl(quantizer: str, **kw: Any) -> float:
    p, q = (x.double().log_softmax(-1) for x in (logits("none"), logits(quantizer, **kw)))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", SPECS)
def test_bytes_and_logits_do_not_depend_on_the_schedule(name: str) -> None:
    """Under swapping, recomputation, prefix hits and other chunks, to the bit."""

    def run(roomy: bool, preemptor: str = "swap", chunk: int = 512, warm: bool = False) -> tuple[Any, dict[str, Any]]:
        size = {"num_blocks": 60 if roomy else 16, "preemptor": preemptor, "max_num_batched_tokens": chunk}
        with make(SPECS[name], 8, deterministic=True, **size) as e:
            if warm:
                e.generate(PROMPTS, PARAMS)
            bytes_of = keep_stored(e)
            outs = e.generate(PROMPTS, PARAMS)
            e.check()
            return [(o.token_ids, o.logprobs, bytes_of[o.id]) for o in outs], e.metrics()["cache"]

    calm, _ = run(roomy=True)
    for preemptor, chunk, warm in (("swap", 512, False), ("recompute", 24, False), ("swap", 24, True)):
        got, cache = run(False, preemptor, chunk, warm)
        assert got == calm
        assert cache["preemptions"] > 0
        assert (cache["swap_bytes"] > 0) == (preemptor == "swap")
    hits, cache = run(roomy=True, warm=True)
    assert hits == calm
    assert cache["prefix_hits_tokens"] > 0


def test_what_decode_gives_is_what_a_score_sees() -> None:
    assert 0 < kl("rooted") < 1e-2
    assert kl("zeros") > 30 * kl("rooted")
    assert kl("zeros", max_num_batched_tokens=1, max_num_seqs=1) == kl("zeros"), "token by token as in one prefill"


def test_a_decode_that_disagrees_with_its_format_is_an_error_and_no_number() -> None:
    before = model().config._attn_implementation
    with pytest.raises(ConfigError, match="quantizer untrue, layer 0, V: decode differs by up to"):
        make("untrue")
    assert model().config._attn_implementation == before


def test_without_allow_reference_the_engine_says_why_it_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"own decode, in Python.*allow_reference is false"):
        make("rooted", allow_reference=False)


def test_static_tensors_of_any_name_are_calibrated_stored_checked_and_read(tmp_path: Any) -> None:
    with make() as e:
        file = absmax_scales(e, [tokens(99, 100)], Spread())
        layers = e.layers
    assert set(file.tensors) == {f"layers.{i}.{side}_spread" for i in range(len(layers)) for side in "kv"}
    file.save(tmp_path / "s.safetensors")
    good = ScaleFile.load(tmp_path / "s.safetensors")
    assert 0 < kl("spread", scales=good) < 1e-2
    with make("spread", scales=good) as e:
        memory = e.metrics()["memory"]
    assert memory["static_bytes"] == sum(t.nbytes for t in file.tensors.values())
    for name, value, message in (
        ("layers.1.v_spread", None, "layer 1: v_spread is missing"),
        ("layers.1.v_spread", torch.nan, "layer 1: v_spread holds nan"),
        ("layers.1.k_scale", 1.0, "layer 1: .* reads no k_scale; it reads k_spread, v_spread"),
    ):
        other = ScaleFile(dict(file.tensors), file.metadata)
        if value is None:
            del other.tensors[name]
        else:
            other.tensors[name] = torch.full_like(file.tensors["layers.1.v_spread"], value)
        with pytest.raises(ScaleError, match=message):
            make("spread", scales=other)
    with pytest.raises(ScaleError, match=r"quantizer spread needs a scale file.*calibration\.run"):
        make("spread", scales=None)


@dataclass
class Counted(Rooted):
    """Declares a tensor that is made of something other than a range."""

    name = "counted"

    def static_tensors(self) -> list[StaticTensor]:
        return [StaticTensor("k", "total", ("H",), ("histogram",), lambda counts: counts.sum((1, 2)))]


def test_tensors_that_no_range_determines_are_made_as_collected_and_other_methods_refuse_them() -> None:
    collected = {0: {f"{s}_{kind}": torch.ones(2, 4) for s in "kv" for kind in ("channel_min", "channel_max")}}
    collected[0]["k_histogram"] = torch.ones(2, 4, 5)
    made = search.tensors(Counted(), collected, [], "absmax", 100)
    assert made["layers.0.k_total"].tolist() == [20, 20]
    with pytest.raises(ConfigError, match=r"method=percentile chooses ranges, but quantizer counted makes .* from k_histogram"):
        fit(None, Statistics({}, {}), Counted(), "percentile", 99)  # type: ignore[arg-type]  # it is refused before it needs one
