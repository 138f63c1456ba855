"""A device is fitted to timed steps, and predicts others."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import run
from experiments.studies.validate import Step, fit
from qkv.config import DeviceConfig, EngineConfig
from qkv.models import dimensions
from qkv.simulation.cost import StepCost
from qkv.validate import from_mapping

CONFIG = from_mapping(EngineConfig, {"model": {"name": "smollm2", "dtype": "bfloat16"}}, "test")


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_a_fit_finds_the_device_that_steps_were_made_with(overlap: float) -> None:
    rates: dict[str, Any] = {
        "bandwidth": 3e10,
        "kv_bandwidth": 8e9,
        "flops": 4e11,
        "attention_flops": 1.2e11,
        "overhead_s": 0.004,
    }
    device, dims, rng = DeviceConfig("cpu", overlap=overlap, **rates), dimensions(CONFIG.model), random.Random(0)
    cost = StepCost.of(device, dims, 2, 2 * 3 * 64 * 30 * 2)
    steps = []
    for n in (0, 1, 4, 16, 48):
        for context in (32, 256, 1024):
            for chunks in ((), ((0, context),), ((0, 32), (100, 356))):
                rows = n + len(chunks)
                if not rows:
                    continue
                for _ in range(5):
                    disturbed = 5 * rng.random() if rng.random() < 0.1 else 0.02 * rng.random()
                    seconds = cost.seconds(n, n * context, chunks, rows) * (1 + disturbed)
                    steps.append(Step(n, n * context, chunks, rows, seconds))
    found = StepCost.of(fit(CONFIG, steps, rates["bandwidth"]), dims, 2, cost.kv_bytes_per_token)
    for step in steps[::5]:
        arguments = (step.decodes, step.keys, step.chunks, step.rows)
        assert found.seconds(*arguments) == pytest.approx(cost.seconds(*arguments), rel=0.05)
    assert found.device.name == "cpu"
    assert replace(found.device, memory="1GiB").bandwidth == rates["bandwidth"]


def test_the_prediction_and_its_error_are_in_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["model=llama3-8b-tiny", "model.dtype=float32", "data=pydoc", "cache.memory_bytes=4MiB", "logger=none"]
    tiny += ["batches=[1,3]", "contexts=[8,40]", "steps=3", "workload.num_requests=12", "workload.concurrency=4"]
    tiny += ["workload.prompt_tokens=24", "workload.output_tokens=6", "workload.max_tokens=200"]
    out = tmp_path / "device.yaml"
    assert run.main(["experiment=validate", *tiny, f"write={out}", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text(encoding="utf-8"))
    real, simulated = record["rows"]
    assert set(record["device"]["median_step_error"]) == {"decode", "mixed", "prefill"}
    for name, value in simulated["prediction_error"].items():
        assert value > -1, name
    error = simulated["speed"]["output_tokens_per_s"] / real["speed"]["output_tokens_per_s"] - 1
    assert simulated["prediction_error"]["output tokens/s"] == pytest.approx(error)
    assert "step error" in capsys.readouterr().out
    values = {"model": {"name": "llama2-7b"}, "device": _yaml(out)}
    assert from_mapping(EngineConfig, values, "test").device.name == "cpu"


def _yaml(path: Path) -> dict[str, object]:
    import yaml

    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found
