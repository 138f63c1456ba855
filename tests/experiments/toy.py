"""Toy sizes for any command of experiments.run: the overrides that make what it names run in seconds, and nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.harness import cli
from experiments.harness.record import flatten

CONF = Path(__file__).parents[2] / "conf"

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
    "minutes": 0.01,
    "num_requests": 24,
    "operations": 6,
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
MODEL = ["model=llama3-8b-tiny", "model.dtype=float32"]
POOL = ["cache.memory_bytes=4MiB"]
NEEDED = {
    "ablation": ["tokens_per_document=170", "error_documents=1"],
    "accuracy": ["cache.memory_bytes=null", "tasks=[next_passage]", "schedule_documents=1"],
    "bench_lm": ["cache.memory_bytes=null"],
    "frontier": ["cache.memory_bytes=null"],
    "recommend": ["plan.device_memory=1GiB", "plan.context=600"],
}


def composed(arguments: Sequence[str], config: str = "config", resolve: bool = False) -> dict[str, Any]:
    """The settings that a command line means. resolve: interpolations too, and nothing may be missing."""
    cli.register_resolvers(CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = cli.tasks_apart([a for a in arguments if not a.startswith("-")])
        values = OmegaConf.to_container(compose(config, words), resolve=resolve, throw_on_missing=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def smaller(values: dict[str, Any], keep: Sequence[str] = ()) -> list[str]:
    """Overrides that shrink these settings. keep: names of keys that stay as they are."""
    simulated = values["runner"]["name"] == "simulated"
    parts = {key: value for key, value in values.items() if key not in ("data", "hydra", "scheduler", "model", "runner")}
    found = []
    for key in flatten(parts):
        dotted = str(key).replace("/", ".")
        value = SMALLER.get(dotted, SMALLER.get(dotted.rpartition(".")[2]))
        if dotted == "workload.max_tokens":  # it must hold the prefix that requests share
            value = max(value, values["workload"]["prefix_tokens"] + 24)
        if value is not None and dotted not in keep:
            found.append(f"{dotted}={json.dumps(value)}")
    return [*([] if simulated else POOL), *found]
