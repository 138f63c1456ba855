"""Runs one task on one model and returns lm-eval's result, what the engine did for it, and the score of every sample.

Takes: a QkvLM and a task. Gives: a result, which is plain JSON, and Scores. Does not know about: baselines, tables, where results
are kept.
"""

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.utils import handle_non_serializable
from tqdm import tqdm

from experiments.lm.model import QkvLM
from qkv.errors import ConfigError
from qkv.validate import suggest

SEEDS = (0, 1234, 1234, 1234)  # lm-eval's defaults: random, numpy, torch, few-shot examples


@dataclass(frozen=True)
class Settings:
    """How tasks are run. limit: how many samples of each task; None: all. fewshot: how many examples before each sample; None: as
    the task says. chat: put prompts into the model's chat template. generation: replaces a task's own generation_kwargs, key by
    key."""

    limit: int | None = None
    fewshot: int | None = None
    chat: bool = False
    generation: Mapping[str, Any] | None = None


def run(lm: QkvLM, name: str, task: Any, settings: Settings) -> dict[str, Any]:
    """lm-eval's own results of one task, with "qkv": {seconds, samples, prefill_tokens, scored_tokens, generated_tokens,
    fraction_read_from_cache, hit_rate, truncated_requests, truncated_tokens}. The prefix cache is emptied first, so that every
    quantizer runs the same schedule, whatever ran before."""
    lm.reset_counts()
    lm.engine.reset_prefix_cache()
    lm.engine.reset_metrics()
    out, metrics = timed(lm, name, task, settings), lm.engine.metrics()
    out["qkv"] |= {
        "prefill_tokens": metrics["tokens"]["prefill"],
        "scored_tokens": lm.scored_tokens,
        "generated_tokens": lm.generated_tokens,
        "fraction_read_from_cache": metrics["fraction_read_from_cache"],
        "hit_rate": metrics["cache"]["hit_rate"],
        "truncated_requests": lm.truncated.requests,
        "truncated_tokens": lm.truncated.tokens,
    }
    return out


def timed(lm: Any, name: str, task: Any, settings: Settings) -> dict[str, Any]:
    """For any lm-eval model: lm-eval's results of one task, with "qkv": {seconds, samples}. All of it is plain JSON."""
    configure(task, settings)
    random.seed(SEEDS[0])
    np.random.seed(SEEDS[1])
    torch.manual_seed(SEEDS[2])
    began = time.perf_counter()
    with ExitStack() as stack:
        for module in (
            "lm_eval.api.task",
            "lm_eval.api.model",
            "lm_eval.models.huggingface",
        ):  # their progress bars have no switch
            if module in sys.modules:
                stack.enter_context(mock.patch(f"{module}.tqdm", _no_bar))
        out = evaluator.evaluate(
            lm=lm,
            task_dict={"tasks": {name: task}},
            limit=settings.limit,
            bootstrap_iters=0,  # lm-eval's standard errors are per run; ours are per pair
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
        )
    seconds = time.perf_counter() - began
    assert out is not None
    out["qkv"] = {"seconds": seconds, "samples": len({s["doc_id"] for s in out["samples"][name]})}
    plain: dict[str, Any] = json.loads(json.dumps(out, default=handle_non_serializable))
    return plain


def _no_bar(*args: Any, **options: Any) -> Any:
    return tqdm(*args, **options | {"disable": True})


def configure(task: Any, settings: Settings) -> None:
    """Do to a task what lm-eval's simple_evaluate does before it runs one. The generator of few-shot examples starts anew, so
    every quantizer runs the task on the same prompts."""
    if settings.fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=settings.fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    if settings.generation and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(settings.generation), update=True)
    task.set_fewshot_seed(seed=SEEDS[3])


@dataclass(frozen=True)
class Sample:
    """One sample of a task and how a model did. score: higher is better. answer: what the model chose or wrote."""

    id: int
    score: float
    answer: str
    target: str
    prompt: str


@dataclass(frozen=True)
class Scores:
    """One metric of one task. value, stderr: lm-eval's value of the metric and its standard error. unit: of the samples' scores;
    "points" where they are shares of right answers. binary: all scores are 0 or 1."""

    metric: str
    value: float
    stderr: float
    unit: str
    binary: bool
    samples: list[Sample]


def scores(result: Mapping[str, Any], task: str, metric: str | None = None) -> Scores:
    """The Scores of one metric of the task; None: the metric that its YAML names first. Raises ConfigError for a metric that the
    task does not have, or that cannot be compared sample by sample."""
    keys = [key for key in result["results"][task] if "," in key and "_stderr," not in key]
    listed = [str(entry["metric"]) for entry in result["configs"][task].get("metric_list") or []]
    names = [*listed, *(key.split(",")[0] for key in keys)]
    found = next((key for name in ([metric] if metric else names) for key in keys if key.split(",")[0] == name), None)
    if found is None:
        raise ConfigError(f"task_metrics: task '{task}' has no '{metric}'; {suggest(str(metric), dict.fromkeys(names))}")
    metric, filtered = found.split(",", 1)
    rows = [s for s in result["samples"][task] if s["filter"] == filtered and metric in s["metrics"]]
    raw = [s[metric] for s in rows]
    better = result["higher_is_better"][task].get(metric)
    value = float(result["results"][task][found])
    if all(isinstance(x, list) and len(x) == 2 for x in raw):  # a log-likelihood and its weight, a number of words or bytes
        weights = [float(w) for _, w in raw]
        each, unit = [float(x) / w for (x, w), w in zip(raw, weights, strict=True)], f"nats per {_weighed(metric)}"
        stderr = _weighted_error(each, weights) * (value if metric != "bits_per_byte" else 1 / math.log(2))
    elif not all(isinstance(x, int | float) for x in raw):
        raise ConfigError(f"task '{task}': '{metric}' has no score per sample, so quantizers cannot be compared on it")
    elif metric == "perplexity":  # in a cloze task the sample's value is its log-likelihood
        each, unit = [float(x) for x in raw], "nats"
        stderr = _error(each) * value
    else:
        each, unit = [float(x) if better is not False else -float(x) for x in raw], "points"
        stderr = _error(each)
        unit = unit if all(0 <= abs(x) <= 1 for x in each) else metric
    binary = unit == "points" and all(x in (0.0, 1.0) for x in each)
    kind = result["configs"][task]["output_type"]
    samples = [
        Sample(int(row["doc_id"]), score, _answer(row, kind), str(row["target"]), str(row["arguments"][0][0]))
        for row, score in zip(rows, each, strict=True)
    ]
    return Scores(metric, value, stderr, unit, binary, samples)


def _answer(row: Mapping[str, Any], kind: str) -> str:
    match kind:
        case "multiple_choice":
            chosen = max(range(len(row["arguments"])), key=lambda i: row["filtered_resps"][i][0])
            return str(row["arguments"][chosen][1]).strip()
        case "loglikelihood":
            return "as expected" if row["filtered_resps"][0][1] else "another word"
        case "generate_until":
            return str(row["filtered_resps"][0])
    return ""


def _weighed(metric: str) -> str:
    return "word" if metric.startswith("word") else "byte"


def _error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _weighted_error(values: list[float], weights: list[float]) -> float:
    """The standard error of the weighted mean, where samples are independent of each other."""
    n, total = len(values), sum(weights)
    if n < 2:
        return math.nan
    mean = sum(x * w for x, w in zip(values, weights, strict=True)) / total
    return math.sqrt(n / (n - 1) * sum((w * (x - mean)) ** 2 for x, w in zip(values, weights, strict=True))) / total
