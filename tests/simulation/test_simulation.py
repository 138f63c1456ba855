"""A simulated engine plans for real on simulated time. Taking many steps at once only makes it faster."""

import random
from typing import Any

import pytest

from qkv.config import DeviceConfig, EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.metrics.sketch import EXACT, GAMMA, Sketch
from qkv.simulation import SimulatedClock
from qkv.simulation.cost import StepCost
from qkv.types import SamplingParams
from qkv.validate import from_mapping

SETTINGS: dict[str, Any] = {
    "model": {"name": "llama2-7b", "dtype": "float16"},
    "runner": {"name": "simulated"},
    "device": {
        "name": "card",
        "bandwidth": 1e12,
        "kv_bandwidth": 1e12,
        "flops": 1e14,
        "attention_flops": 5e13,
        "overhead_s": 1e-3,
    },
    "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 256},
    "cache": {"num_blocks": 400, "host_memory_bytes": "2GiB"},
}


def make(jumps: bool = True, **changes: Any) -> Engine:
    merged = SETTINGS | {k: {**SETTINGS.get(k, {}), **v} for k, v in changes.items()}
    engine = Engine.from_config(from_mapping(EngineConfig, merged, "test"))
    engine._loop.jumps = jumps  # type: ignore[attr-defined]
    return engine


def drive(engine: Engine, seed: int = 0, count: int = 60, rate: float = 4.0, shared: int = 0) -> list[Any]:
    """Run Poisson arrivals on the engine's clock; returns all that each request ended with."""
    rng, clock = random.Random(seed), engine.clock
    assert isinstance(clock, SimulatedClock)
    prefix = [7] * shared
    arrivals, at = [], 0.0
    for i in range(count):
        at += rng.expovariate(rate)
        prompt = prefix + [rng.randrange(32_000) for _ in range(rng.randrange(1, 120))]
        arrivals.append((at, prompt, SamplingParams(max_tokens=rng.randrange(1, 90), priority=i % 2)))
    ended: list[Any] = []
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= clock.now:
            engine.add_request(*arrivals.pop(0)[1:])
        clock.deadline = arrivals[0][0] if arrivals else float("inf")
        if not engine.has_work:
            clock.wait_until(clock.deadline)
            continue
        for r in engine.advance():
            if r.finish_reason is not None:
                ended.append((r.id, r.finish_reason, list(r.token_ids), list(r.token_times), r.preemptions, r.cached_tokens))
        engine.check()
    return ended


CASES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "prefix cache off": {"cache": {"enable_prefix_caching": False}},
    "recompute": {"cache": {"num_blocks": 40}, "preemptor": {"name": "recompute"}},
    "swap": {"cache": {"num_blocks": 40}, "preemptor": {"name": "swap"}},
    "auto, watermark": {"cache": {"num_blocks": 40}, "preemptor": {"name": "auto"}, "scheduler": {"watermark": 0.1}},
    "contiguous": {"allocator": {"name": "contiguous", "max_len": 320}},
    "large blocks": {"allocator": {"name": "paged", "block_size": 64}},
    "int8_token": {"quantizer": {"name": "int8_token"}, "cache": {"num_blocks": 40}},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_many_steps_at_once_equal_the_same_steps_one_by_one(case: str, rate: float) -> None:
    """Tokens, times, counters and the record's numbers, bit for bit."""
    shared = 48 if case in ("roomy", "recompute") else 0
    fast, slow = make(True, **CASES[case]), make(False, **CASES[case])
    jumps: list[int] = []
    advance = fast.scheduler.advance
    fast.scheduler.advance = lambda seconds: (jumps.append(len(seconds)), advance(seconds))[1]  # type: ignore[method-assign,func-returns-value]
    assert drive(fast, rate=rate, shared=shared) == drive(slow, rate=rate, shared=shared)
    assert fast.metrics() == slow.metrics()
    assert fast.recorder == slow.recorder
    assert fast.scheduler.step == slow.scheduler.step
    assert sum(jumps) > fast.recorder.steps / 3, "too few steps were taken at once for the test to mean something"
    if "num_blocks" in CASES[case].get("cache", {}) and rate > 1:
        assert fast.recorder.preemptions


def test_the_same_seed_gives_the_same_run_and_another_seed_other_tokens() -> None:
    first, second = drive(make()), drive(make())
    assert first == second
    other = make()
    other._parts.runner.tokens = type(other._parts.runner.tokens)(1, 32_000)  # type: ignore[attr-defined]
    assert [e[2] for e in drive(other)] != [e[2] for e in first]


def test_a_generated_token_depends_on_the_request_and_the_position_only() -> None:
    tight, roomy = make(cache={"num_blocks": 40}, preemptor={"name": "recompute"}), make()
    assert {e[0]: e[2] for e in drive(tight, rate=20.0)} == {e[0]: e[2] for e in drive(roomy, rate=20.0)}


def test_stop_tokens_end_requests_in_a_simulation_too() -> None:
    engine = make()
    (free,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=50))
    stop = free.token_ids[20]
    again = make()
    (stopped,) = again.generate([[1, 2, 3]], SamplingParams(max_tokens=50, stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_scoring_is_refused() -> None:
    with pytest.raises(ConfigError, match="no logits"):
        make().score([[1, 2, 3]])


def test_a_step_costs_the_slower_of_bytes_and_operations() -> None:
    device = DeviceConfig("d", "80GiB", bandwidth=1e9, kv_bandwidth=5e8, flops=1e12, attention_flops=1e12, overhead_s=0.01)
    cost = StepCost(device, weight_bytes=10**8, body=5 * 10**7, head=10**6, pair_operations=1000, kv_bytes_per_token=1000)
    assert cost.seconds(1, 0, (), 1) == pytest.approx(0.01 + 0.1)
    assert cost.seconds(0, 0, [(0, 10_000)], 1) == pytest.approx(
        0.01 + 1.0 + max(10_000 * 1000 / 5e8, 10_000 * 10_001 / 2 * 1e3 / 1e12), rel=1e-4
    )
    assert cost.seconds(4, 10**6, (), 4) == pytest.approx(0.01 + 0.1 + 2.0)


def test_swapping_takes_the_time_of_the_link() -> None:
    engine = make(device={"host_link": 1e9})
    before = engine.clock()
    engine._parts.store.copy_out([1, 2], [0, 1])
    assert engine.clock() - before == pytest.approx(2 * engine._parts.store.block_bytes / 1e9)


def test_dimensions_without_parameters_cannot_be_simulated() -> None:
    shape = {"name": "shape", "dtype": "float16", "layers": 2, "kv_heads": 2, "head_dim": 64}
    with pytest.raises(ConfigError, match=r"model\.parameters"):
        Engine.from_config(from_mapping(EngineConfig, SETTINGS | {"model": shape}, "test"))
    engine = Engine.from_config(from_mapping(EngineConfig, SETTINGS | {"model": shape | {"parameters": 10**8}}, "test"))
    assert len(engine.generate([[1, 2]], SamplingParams(max_tokens=5))[0].token_ids) == 5


def test_percentiles_of_many_values_stay_within_the_promised_error() -> None:
    rng, sketch = random.Random(0), Sketch()
    values = [rng.lognormvariate(0, 2) for _ in range(3 * EXACT)]
    for i in range(0, len(values), 100):
        sketch.add(values[i : i + 100])
    found, values = sketch.distribution(), sorted(values)
    assert found is not None
    assert found["mean"] == pytest.approx(sum(values) / len(values))
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert found[name] == pytest.approx(values[int(share * len(values))], rel=GAMMA - 1)


def test_a_simulation_counts_the_static_tensors_of_every_layer() -> None:
    from experiments.measuring.scales import stand_in
    from qkv.policies.quantizer.base import QUANTIZERS

    layers = make().layers
    scales = stand_in(QUANTIZERS.build("int8"), layers)
    settings = SETTINGS | {"quantizer": {"name": "int8"}, "scales": scales}
    with Engine.from_config(from_mapping(EngineConfig, settings, "test")) as engine:
        assert engine.metrics()["memory"]["static_bytes"] == sum(4 * la.H * la.Dk for la in layers)
