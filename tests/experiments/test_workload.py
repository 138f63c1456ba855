"""Workloads are seeded, as long as asked for, and share what they say and nothing else; they drive open and closed loops."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from experiments.harness.workload import Arrival, Slo, Traffic, Workload
from experiments.measuring.serving import serve
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.validate import from_mapping

VOCAB = 32_000


def requests(seed: int = 0, **settings: Any) -> list[Arrival]:
    return list(Traffic(Workload(**settings), seed, VOCAB))


def engine(**changes: Any) -> Engine:
    settings: dict[str, Any] = {"model": {"name": "llama2-7b", "dtype": "float16"}, "runner": {"name": "simulated"}}
    settings |= {"device": {"bandwidth": 1e12, "flops": 1e14, "overhead_s": 1e-3}, "cache": {"num_blocks": 600}}
    return Engine.from_config(from_mapping(EngineConfig, settings | changes, "test"))


def test_the_same_seed_gives_the_same_requests() -> None:
    settings: dict[str, Any] = {"num_requests": 50, "lengths": "lognormal", "arrivals": "poisson", "prefix_groups": 3}
    settings |= {"prefix_tokens": 20, "prompt_tokens": 30, "output_tokens": 9}
    assert requests(**settings) == requests(**settings)
    assert requests(**settings) != requests(1, **settings)


@pytest.mark.parametrize("lengths", ["fixed", "uniform", "lognormal"])
def test_lengths_have_the_mean_and_the_spread_asked_for(lengths: str) -> None:
    found = requests(num_requests=4000, prompt_tokens=200, output_tokens=300, lengths=lengths, cv=0.8)
    for values, mean in (([len(p.prompt) for p in found], 200), ([p.output_tokens for p in found], 300)):
        assert statistics.mean(values) == pytest.approx(mean, rel=0.05)
        spread = {"fixed": 0.0, "uniform": 1 / 3**0.5, "lognormal": 0.8}[lengths]
        assert statistics.pstdev(values) / mean == pytest.approx(spread, abs=0.08)


def test_nothing_is_longer_than_max_tokens() -> None:
    for p in requests(num_requests=500, prompt_tokens=300, output_tokens=300, lengths="lognormal", cv=2.0, max_tokens=400):
        assert 3 <= len(p.prompt) + p.output_tokens <= 400


@pytest.mark.parametrize(("arrivals", "cv"), [("poisson", 1.0), ("gamma", 3.0)])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(arrivals: str, cv: float) -> None:
    times = [p.at or 0.0 for p in requests(num_requests=20_000, prompt_tokens=1, arrivals=arrivals, rate=5.0, burstiness=3.0)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)


def test_prompts_share_their_groups_prefix_and_nothing_else() -> None:
    found = requests(num_requests=300, prompt_tokens=40, prefix_groups=4, prefix_tokens=32, prefix_skew=1.0)
    prefixes = [tuple(p.prompt[:32]) for p in found]
    assert len(set(prefixes)) == 4
    popularity = sorted((prefixes.count(p) for p in set(prefixes)), reverse=True)
    assert popularity[0] > 1.5 * popularity[-1]
    assert len({tuple(p.prompt[32:40]) for p in found}) == 300


def test_a_file_is_replayed_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"arrival": 0.5, "prompt_tokens": [5, 6, 7], "output_tokens": 4},
        {"arrival": 1.5, "prompt_tokens": 40, "output_tokens": 5, "prefix_group": "a", "prefix_tokens": 32},
        {"arrival": 2.5, "prompt_tokens": 50, "output_tokens": 6, "prefix_group": "a", "prefix_tokens": 32},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = requests(arrivals="trace", file=str(file))
    assert (first.prompt, first.at, first.output_tokens) == ([5, 6, 7], 0.5, 4)
    assert second.prompt[:32] == third.prompt[:32]
    assert [len(p.prompt) for p in (second, third)] == [40, 50]
    sampled = requests(lengths="file", file=str(file), num_requests=40)
    assert {p.output_tokens for p in sampled} == {4, 5, 6}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2"),
        ("[1]", "not a JSON object"),
        ('{"output_tokens": 3}', "no prompt_tokens"),
        ('{"prompt_tokens": 0, "output_tokens": 3}', "prompt_tokens=0 is not allowed"),
        ('{"prompt_tokens": 4, "output_tokens": "x"}', "output_tokens='x' is not allowed"),
        ('{"prompt_tokens": 4, "output_tokens": 4, "arrival": -1}', "arrival=-1 is not allowed"),
        ('{"prompt_tokens": 4, "output_tokens": 4, "arrival": 0.5}', "goes back in time"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt_tokens": 4, "output_tokens": 4, "arrival": 1}\n' + line)
    with pytest.raises(ConfigError, match=r"trace\.jsonl line 2") as raised:
        requests(arrivals="trace", file=str(file))
    assert what in str(raised.value)


def test_a_closed_loop_keeps_its_concurrency_and_leaves_the_start_out_of_the_latencies() -> None:
    e, most = engine(), 0

    def look() -> None:
        nonlocal most
        most = max(most, e.scheduler.num_running + e.scheduler.num_waiting)

    work = Workload(num_requests=40, prompt_tokens=30, output_tokens=20, lengths="uniform", arrivals="closed", concurrency=5)
    served = serve(e, Traffic(work, 0, VOCAB), tick=look)
    assert most == 5
    assert served.requests == 40
    assert served.latencies._sketches["ttft_s"]._values
    assert len(served.latencies._sketches["ttft_s"]._values) == 35
    assert served.output_tokens == sum(p.output_tokens for p in Traffic(work, 0, VOCAB))


def test_a_closed_loop_on_a_real_clock_leaves_its_start_out_too() -> None:
    with Engine.create("llama2-7b-tiny", num_blocks=100) as real:
        work = Workload(num_requests=8, prompt_tokens=20, output_tokens=4, arrivals="closed", concurrency=3)
        served = serve(real, Traffic(work, 0, 512))
    assert served.requests == 8
    assert len(served.latencies._sketches["ttft_s"]) == 5


def test_waiting_counts_from_the_arrival_and_not_from_the_next_step() -> None:
    e = engine(device={"bandwidth": 1e12, "flops": 1e14, "overhead_s": 1.0})  # a step takes a second
    served = serve(
        e, Traffic(Workload(num_requests=30, prompt_tokens=5, output_tokens=5, arrivals="poisson", rate=3.0), 0, VOCAB)
    )
    ttft = served.latencies.distributions()["ttft_s"]
    assert 1.3 < ttft["mean"] < 1.7


def test_a_conversation_grows_by_what_was_said_and_hits_the_cache() -> None:
    e = engine()
    work = Workload(num_requests=12, prompt_tokens=20, output_tokens=16, turns=4, think_s=1.0, arrivals="poisson", rate=1.0)
    served = serve(e, Traffic(work, 0, VOCAB))
    assert served.requests == 12
    lengths = [20 + 36 * turn for turn in range(4)]
    assert served.prompt_tokens == 3 * sum(lengths)
    assert e.recorder.prefix_hits_tokens > 0.5 * 3 * sum(lengths[:3])


def test_requests_that_cannot_fit_are_refused_and_the_others_served() -> None:
    e = engine(scheduler={"max_model_len": 200})
    served = serve(e, Traffic(Workload(num_requests=50, prompt_tokens=100, output_tokens=80, lengths="uniform"), 0, VOCAB))
    assert served.refused
    assert served.requests == 50 - served.refused
    assert "above the model's limit" in (served.reason or "") or "takes at most" in (served.reason or "")


def test_goodput_counts_the_requests_that_meet_both_levels() -> None:
    slo = Slo(ttft=1.0, tpot=0.1)
    assert slo.met(1.0, 0.1)
    assert slo.met(0.5, None)
    assert not slo.met(1.1, 0.05)
    assert not slo.met(0.5, 0.2)
    assert not slo.met(None, None)
    assert Slo().met(None, 99.0)


def test_prompts_differ_even_where_the_text_repeats_itself() -> None:
    planned = Traffic(Workload(num_requests=300, prompt_tokens=8, turns=1), 0, vocab=100, text=[5] * 50)
    assert len({tuple(p.prompt) for p in planned}) == 300


def test_what_is_shared_counts_towards_max_tokens() -> None:
    settings: dict[str, Any] = {"prefix_groups": 2, "prefix_tokens": 300, "prompt_tokens": 90, "output_tokens": 90}
    for p in requests(num_requests=200, lengths="lognormal", max_tokens=400, **settings):
        assert 300 < len(p.prompt) + p.output_tokens <= 400


def test_a_conversation_pauses_as_long_as_asked_for() -> None:
    traffic = Traffic(Workload(num_requests=8000, turns=2, prompt_tokens=4, think_s=3.0), 0, VOCAB)
    follow = [traffic.next_turn(first, [1, 2], now=100.0) for first in traffic]
    pauses = [turn.at - 100.0 for turn in follow if turn is not None and turn.at is not None]
    assert len(pauses) == 4000
    assert statistics.mean(pauses) == pytest.approx(3.0, rel=0.1)
    last = follow[0]
    assert last is not None
    assert traffic.next_turn(last, [1, 2], now=200.0) is None, "two turns, no third"
