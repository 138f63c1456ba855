"""Turns a run's results into lm-eval's own forms: its result files, and the mapping that its W&B logger takes.

Takes: lm-eval's results per quantizer and task. Gives: files, a mapping. Does not know about: baselines, significance tests.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval.loggers import EvaluationTracker

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by quantizer, by task

_BY_TASK = ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "samples")


def merged(results: Results) -> dict[str, Any]:
    """All results as one, in which each task is called `quantizer.task`."""
    out: dict[str, Any] = {key: {} for key in _BY_TASK} | {"config": {"model": "qkv", "batch_sizes": []}}
    for quantizer, tasks in results.items():
        for key, values in _joined(tasks).items():
            out[key] |= {f"{quantizer}.{task}": value for task, value in values.items()}
    return out


def track(folder: Path, model: str, results: Results) -> None:
    """Write lm-eval's results_….json and samples_….jsonl, in a folder per quantizer."""
    for quantizer, tasks in results.items():
        tracker = EvaluationTracker(output_path=str(folder))
        tracker.general_config_tracker.log_experiment_args("qkv", {"model": f"{model}-{quantizer}"}, None, None, False)
        out = copy.deepcopy(_joined(tasks))  # the tracker rewrites samples in place
        samples = out.pop("samples")
        tracker.save_results_aggregated({**out, "config": {"model": "qkv", "quantizer": quantizer}}, samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task, rows)


def _joined(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {key: {name: value for result in tasks.values() for name, value in result[key].items()} for key in _BY_TASK}
