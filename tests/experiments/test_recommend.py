"""The recommendation keeps the limits, names a runner-up, and says so when nothing fits."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import run
from experiments.harness.workload import Traffic, Workload
from experiments.studies.plan import Demand
from experiments.studies.recommend import Recommend, choose, vllm_flags
from experiments.studies.workload_stats import stats
from qkv.config import EngineConfig


def row(label: str, rate: float, kl: float, misses: list[str]) -> dict[str, Any]:
    return {
        "label": label,
        "speed": {"output_tokens_per_s": rate},
        "accuracy": {"kl_divergence": kl},
        "misses": misses,
        "plan": {"requests": 5},
    }


def test_the_fastest_that_keeps_every_limit_is_chosen() -> None:
    rows = [row("none", 10, 0.0, []), row("int4", 40, 0.5, ["KL"]), row("int8", 20, 0.001, []), row("fp8", 20.3, 0.01, [])]
    choice = choose(rows)
    assert (choice["choice"], choice["runner_up"]) == ("int8", "fp8")
    assert choice["reason"].count(". ") == 1


def test_nothing_kept_names_the_nearest_and_what_it_misses() -> None:
    choice = choose([row("none", 10, 0.0, ["a", "b"]), row("int4", 40, 0.5, ["KL 0.5 is above 0.01"])])
    assert choice["choice"] is None
    assert "int4: KL 0.5 is above 0.01" in choice["reason"]


def test_flags_exist_only_where_vllm_has_the_same_idea() -> None:
    flags = vllm_flags("fp8", 16, Demand(8, 1024), EngineConfig())
    assert flags == "--kv-cache-dtype fp8 --block-size 16 --max-model-len 1024 --max-num-seqs 8 --enable-prefix-caching"
    assert "no KV cache dtype" in vllm_flags("int8", 16, Demand(), EngineConfig())


def test_limits_are_judged_one_by_one() -> None:
    experiment = Recommend(plan=Demand(8, 1024))
    experiment.slo.ttft = 0.1
    measured = row("x", 1, 0.5, []) | {"plan": {"fits": False}}
    measured["speed"] = {"ttft_s": {"p95": 0.2}, "tpot_s": {"p95": 9.0}}
    kl, ttft, fit = experiment.misses(measured)
    assert kl == "KL 0.5 is above 0.01"
    assert ttft == "TTFT p95 0.2 s is above 0.1 s"
    assert fit == "8 x 1,024 tokens do not fit"


def test_everything_together_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["model=llama3-8b-tiny", "data=pydoc", "plan.device_memory=1GiB", "plan.concurrency=8", "plan.context=512"]
    tiny += ["documents=2", "tokens_per_document=64", "calibration_documents=2", "workload.num_requests=40", "quality.kl=0.2"]
    tiny += ["logger=none", f"hydra.run.dir={tmp_path}", "quantizers=[int8,int8_token]"]
    assert run.main(["experiment=recommend", *tiny]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert [r["label"] for r in record["rows"]] == ["none", "int8", "int8_token"]
    for r in record["rows"]:
        assert {"plan", "accuracy", "speed", "memory", "cache"} <= set(r)
    out = capsys.readouterr().out
    assert record["recommendation"]["choice"] in ("none", "int8", "int8_token")
    assert "vLLM: " in out
    assert " ".join(record["recommendation"]["reason"].split()) in " ".join(out.split())


@pytest.mark.parametrize(("groups", "shared", "pays"), [(0, 0, False), (2, 320, True)])
def test_stats_advise_against_prefix_caching_without_repetition(groups: int, shared: int, pays: bool) -> None:
    work = Workload(num_requests=200, prompt_tokens=100, output_tokens=20, prefix_groups=groups, prefix_tokens=shared)
    found = stats(list(Traffic(work, 0, 32_000)), 16)
    assert ("leave prefix caching off" not in found["advice"]) == pays
    assert found["prompt"]["mean"] == shared + 100
    expected = 198 * 320 / (200 * 420) if pays else 0.0
    assert found["prefix_duplication"] == pytest.approx(expected)


def test_stats_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["experiment=workload_stats", "logger=none", "requests=300", f"hydra.run.dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "p99" in out
    assert "leave prefix caching off" in out
