"""Every YAML of conf/experiment runs to its end, at toy size: found there, shrunk by the names of its settings."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments import run
from experiments.harness import cli
from experiments.harness.record import flatten

CONF = Path(__file__).parents[2] / "conf"
NAMES = cli.groups(CONF)["experiment"]

# By dotted name, or by the last part of it; a setting that an experiment does not have is not set.
SMALLER: dict[str, Any] = {
    "archs": ["sm_90"],
    "batch_sizes": [2],
    "batches": [2],
    "block_sizes": [16],
    "calibration_documents": 2,
    "cases": ["1x20"],
    "context_lengths": [40],
    "contexts": [40],
    "documents": 2,
    "formats": ["bf16"],
    "head_dims": [64],
    "held_back": 2,
    "hf_batch_sizes": [2],
    "levels": [1, 4],
    "limit": 2,
    "max_tokens": 8,
    "num_requests": 24,
    "ops": ["decode"],
    "output_tokens": 4,
    "pool_tokens": 8192,
    "pools": [0.5],
    "repeats": 1,
    "requests": 50,
    "sample.tokens": 48,
    "search_documents": 2,
    "seqs": [2],
    "settings": ["int8"],
    "shapes": ["4/2/32"],
    "shared_prefix_tokens": 0,
    "sources": ["pydoc", "banking"],
    "steps": 3,
    "surface_lengths": [1024],
    "surface_pools": [8192],
    "tokens": [1, 4],
    "tokens_per_document": 48,
    "workload.concurrency": 8,
    "workload.max_tokens": 600,
    "workload.prompt_tokens": 24,
}
# What has no smaller default: a tiny real model where a real one runs, and text that is always there.
REAL = ["model=llama3-8b-tiny", "model.dtype=float32", "data=pydoc", "cache.memory_bytes=4MiB"]
NEEDED = {
    "ablation": ["tokens_per_document=170", "error_documents=1"],
    "accuracy": ["cache.memory_bytes=null", "tasks=[next_passage]", "schedule_documents=1"],
    "bench_lm": ["cache.memory_bytes=null"],
    "frontier": ["cache.memory_bytes=null"],
    "recommend": ["plan.device_memory=1GiB", "plan.context=600"],
}


def smaller(name: str) -> list[str]:
    cli.register_resolvers(CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed: Any = OmegaConf.to_container(compose("config", [f"experiment={name}"]), resolve=False)
    assert isinstance(composed, dict)
    simulated = composed["runner"]["name"] == "simulated"
    composed = {key: value for key, value in composed.items() if key not in ("data", "hydra", "scheduler", "model", "runner")}
    found = []
    for key in flatten(composed):
        dotted = str(key).replace("/", ".")
        value = SMALLER.get(dotted, SMALLER.get(dotted.rpartition(".")[2]))
        if value is not None:
            found.append(f"{dotted}={json.dumps(value)}")
    return [*([] if simulated else REAL), *found, *NEEDED.get(name, [])]


@pytest.fixture(scope="module")
def scales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scale file of the tiny model, for experiments that need one."""
    folder = tmp_path_factory.mktemp("scales")
    out = folder / "scales.safetensors"
    assert run.main([*smaller("calibrate"), "experiment=calibrate", "logger=none", f"out={out}", f"hydra.run.dir={folder}"]) == 0
    return out


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_at_toy_size_and_leaves_a_record(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = [f"scales={request.getfixturevalue('scales')}"] if name == "drift" else []
    given += [f"out={tmp_path / 'scales.safetensors'}"] if name == "calibrate" else []
    arguments = [f"experiment={name}", "logger=none", *smaller(name), *given, f"hydra.run.dir={tmp_path}"]
    if name == "compile_kernels":  # in a process of its own, where Triton's interpreter does not stand for its compiler
        pytest.importorskip("triton", reason="triton is not installed")
        environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{CONF.parent}:{CONF.parent / 'kernels'}"}
        command = [sys.executable, "-m", "experiments.run", *arguments]
        done = subprocess.run(command, cwd=CONF.parent, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        assert run.main(arguments) == 0, arguments
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["finished"]
    assert record["rows"]
    assert record["experiment"] == name
