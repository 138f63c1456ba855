"""Experiments under load, at toy size in the simulator: what their tables say must be true of the numbers in the record."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from experiments import run
from experiments.studies.concurrency import find_knee
from experiments.studies.eviction import TRACES, belady, hit_rate
from qkv.policies.evictor.base import EVICTORS

SMALL = ["workload.num_requests=120", "logger=none"]


def run_it(folder: Path, *arguments: str) -> dict[str, Any]:
    assert run.main([*arguments, f"hydra.run.dir={folder}"]) == 0
    record: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    return record


def rows(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in record["rows"]}


def test_throughput_compares_policies_on_equal_pools(tmp_path: Path) -> None:
    surface = ["surface_pools=[8192,32768]", "surface_lengths=[1024,4096]"]  # 8,192 tokens hold two such requests
    record = run_it(tmp_path, "experiment=throughput", *SMALL, "quantizers=[int8_token]", *surface)
    found = rows(record)
    assert list(found) == ["contiguous", "paged", "paged + prefix cache", "+ int8_token"]
    for row in found.values():
        assert row["memory"]["pool_bytes"] == pytest.approx(found["paged"]["memory"]["pool_bytes"], rel=0.002)
    assert {row["requests"]["output_tokens"] for row in found.values()} == {found["paged"]["requests"]["output_tokens"]}
    assert found["paged"]["speed"]["output_tokens_per_s"] > found["contiguous"]["speed"]["output_tokens_per_s"]
    assert found["contiguous"]["memory"]["utilization_mean"] < 0.2
    assert found["paged"]["memory"]["utilization_mean"] == pytest.approx(0.7, abs=0.03)
    assert "wall_s" not in record
    ratios = {(p["pool_tokens"], p["max_length"]): p["ratio"] for p in record["surface"]}
    assert ratios[8192, 4096] > ratios[8192, 1024] > 1
    assert ratios[32768, 4096] < ratios[8192, 4096]
    assert (tmp_path / "throughput.png").exists()
    assert (tmp_path / "surface.png").exists()


def test_a_shared_prompt_gains_from_the_prefix_cache(tmp_path: Path) -> None:
    found = rows(run_it(tmp_path, "experiment=throughput", *SMALL, "workload=system_prompt", "quantizers=[]"))
    plain, cached = found["paged"], found["paged + prefix cache"]
    assert cached["cache"]["hit_rate"] > 0.8
    assert cached["speed"]["output_tokens_per_s"] > 1.2 * plain["speed"]["output_tokens_per_s"]
    assert cached["speed"]["ttft_s"]["mean"] < 0.6 * plain["speed"]["ttft_s"]["mean"]


@pytest.mark.slow
def test_what_paging_and_sharing_gain_at_full_size(tmp_path: Path) -> None:
    """2,000 requests for llama2-7b on a simulated A100: the gains that the README of experiments speaks of."""
    record = run_it(tmp_path / "chat", "experiment=throughput", "quantizers=[]", "logger=none")
    found = rows(record)
    gain = found["paged"]["speed"]["output_tokens_per_s"] / found["contiguous"]["speed"]["output_tokens_per_s"]
    assert gain >= 2.56
    assert found["contiguous"]["memory"]["utilization_mean"] == pytest.approx(0.12, abs=0.01)
    ratios = {(p["pool_tokens"], p["max_length"]): p["ratio"] for p in record["surface"]}
    assert 1.2 <= ratios[114_688, 4096] <= 1.6
    shared = ["workload=system_prompt", "surface_pools=[]", "surface_lengths=[]"]
    found = rows(run_it(tmp_path / "shared", "experiment=throughput", "quantizers=[]", "logger=none", *shared))
    plain, cached = found["paged"]["speed"], found["paged + prefix cache"]["speed"]
    assert cached["output_tokens_per_s"] >= 1.38 * plain["output_tokens_per_s"]
    assert cached["ttft_s"]["mean"] <= 0.45 * plain["ttft_s"]["mean"]


def test_the_same_seed_gives_the_same_record_byte_for_byte(tmp_path: Path) -> None:
    records = []
    for name in ("a", "b"):
        run_it(tmp_path / name, "experiment=throughput", *SMALL, "surface_pools=[16384]", "surface_lengths=[2048]")
        records.append((tmp_path / name / "record.json").read_bytes())
    assert records[0] == records[1]


def test_block_size_wastes_half_a_block_and_recommends_within_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_it(tmp_path, "experiment=block_size", "workload.num_requests=300", "logger=none", "sizes=[8,16,32,64]")
    for row, size, expected in zip(record["rows"], (8, 16, 32, 64), (0.013, 0.026, 0.052, 0.10), strict=True):
        assert row["blocks"]["waste_at_end"] == pytest.approx(expected, rel=0.25), size
        assert row["blocks"]["waste_expected"] == pytest.approx(size / 600)
        assert row["blocks"]["table_entries"] == 2048 // size
    assert record["rows"][3]["cache"]["hit_rate"] == 0  # 48 shared tokens are less than a block of 64
    assert record["recommended_block_size"] == 16
    assert "allocator.block_size=16" in capsys.readouterr().out


def test_preemption_recomputes_or_swaps_as_told(tmp_path: Path) -> None:
    arguments = ["pools=[0.4]", "prompt_tokens=[200]", "preemptors=[recompute,swap]"]
    first, second = run_it(tmp_path, "experiment=preemption", *SMALL, *arguments)["rows"]
    assert first["cache"]["preemptions"] > 0
    assert second["cache"]["preemptions"] > 0
    assert first["cache"]["recompute_tax"] > 0 == first["cache"]["swap_bytes"]
    assert second["cache"]["swap_bytes"] > 0 == second["cache"]["recompute_tax"]
    assert first["speed"]["goodput_requests_per_s"] <= first["speed"]["requests_per_s"]


def test_concurrency_marks_the_knee_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levels = ["levels=[1,4,16,64]", "requests_per_level=4", "cache.memory_bytes=6GiB", *SMALL]
    record = run_it(tmp_path, "experiment=concurrency", *levels)
    assert "pool is exhausted" in record["knee"]["reason"]
    assert "<- knee" in capsys.readouterr().out


def test_a_trace_has_no_arrivals_here_but_keeps_its_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "prompt_tokens": 40, "output_tokens": 5}\n' * 3)
    levels = ["workload=trace", f"workload.file={trace}", "levels=[2]", "requests_per_level=10", "logger=none"]
    record = run_it(tmp_path / "run", "experiment=concurrency", *levels)
    (row,) = record["rows"]
    assert row["requests"]["prompt_tokens"] == 20 * 40
    assert row["requests"]["output_tokens"] == 20 * 5
    assert record["knee"]["reason"] == "the only level tried"


def test_what_cannot_be_served_is_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levels = ["levels=[4]", "requests_per_level=20", "scheduler.max_model_len=600", *SMALL]
    (row,) = run_it(tmp_path, "experiment=concurrency", *levels)["rows"]
    assert row["requests"]["refused"] > 0
    assert row["requests"]["served"] + row["requests"]["refused"] == 80
    assert f"{row['requests']['refused']} requests were refused" in capsys.readouterr().err


def test_how_a_row_came_about_goes_to_the_logger(tmp_path: Path) -> None:
    levels = ["levels=[4]", "requests_per_level=30", "workload.num_requests=120", "logger=jsonl"]
    (row,) = run_it(tmp_path, "experiment=concurrency", *levels)["rows"]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert 50 <= len(samples) <= 101
    assert samples[-1]["requests_finished"] == 120
    assert samples[-1]["tokens_decoded"] == row["requests"]["output_tokens"] - 120
    assert [s["seconds"] for s in samples] == sorted(s["seconds"] for s in samples)
    assert 0 < max(s["pool"] for s in samples) <= 1


def test_the_simulators_own_cost_is_in_its_record(tmp_path: Path) -> None:
    (row,) = run_it(tmp_path, "experiment=bench_simulator", *SMALL)["rows"]
    cost = row["simulator"]
    assert cost["request_steps"] == row["requests"]["output_tokens"]
    assert cost["request_steps_per_s"] == pytest.approx(cost["request_steps"] / cost["seconds"])
    assert cost["peak_resident_bytes"] > 0


@pytest.mark.parametrize(
    ("rates", "preempted", "limit", "at", "why"),
    [
        ([10, 19, 30, 31], 0, 512, 4, "compute bound"),
        ([10, 19, 30, 31], 3, 512, 4, "pool is exhausted"),
        ([10, 19, 30, 30], 0, 4, 4, "queueing"),
        ([10, 19, 37, 73], 0, 512, 8, "not reached"),
    ],
)
def test_the_knee_and_its_reason(rates: list[float], preempted: int, limit: int, at: int, why: str) -> None:
    measured = [
        {
            "policy": {"concurrency": 2**i},
            "speed": {"output_tokens_per_s": rate, "tpot_s": {"p50": 0.01 * (i + 1)}},
            "memory": {"utilization_peak": 0.5},
            "cache": {"preemptions": preempted if i == 3 else 0},
        }
        for i, rate in enumerate(rates)
    ]
    knee = find_knee(measured, 0.9, limit)
    assert knee["concurrency"] == at
    assert why in knee["reason"]


def test_eviction_measures_every_policy_under_the_optimum(tmp_path: Path) -> None:
    record = run_it(tmp_path, "experiment=eviction", "requests=200", "sizes=[0.1,0.5]", "logger=none", "evictors=[lru,fifo]")
    found = {(r["policy"]["trace"], r["policy"]["evictor"]): r["cache"]["hit_rates"] for r in record["rows"]}
    assert {trace for trace, _ in found} == set(TRACES)
    for (trace, policy), rates in found.items():
        for size, rate in rates.items():
            assert rate <= found[trace, "belady"][size] + 1e-12, (trace, policy, size)


@pytest.mark.parametrize("evictor", EVICTORS.names())
def test_no_policy_beats_foresight(evictor: str) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        documents = [tuple(rng.randrange(4) for _ in range(rng.randrange(1, 6))) for _ in range(12)]
        trace = [rng.choice(documents) for _ in range(80)]
        for blocks in (6, 9, 14):
            assert hit_rate(trace, blocks, evictor) <= belady(trace, blocks) + 1e-12


def test_the_prompts_of_a_workload_are_a_trace_too(tmp_path: Path) -> None:
    own = ["traces=[workload]", "workload=system_prompt", "requests=40", "sizes=[1.0]", "evictors=[lru]", "logger=none"]
    best, lru = run_it(tmp_path, "experiment=eviction", *own)["rows"]
    assert lru["cache"]["hit_rate"] == best["cache"]["hit_rate"] > 0.8  # all but the first prompt share 93 blocks


def test_foresight_on_a_trace_that_can_be_checked_by_hand() -> None:
    """The cache has two places. Of a b c a b c, keeping a and then b gives two hits; LRU gives none."""
    trace = [(1,), (2,), (3,), (1,), (2,), (3,)]
    assert belady(trace, 2) == pytest.approx(2 / 6)
    assert hit_rate(trace, 2, "lru") == 0
    assert belady(trace, 3) == hit_rate(trace, 3, "lru") == 0.5
