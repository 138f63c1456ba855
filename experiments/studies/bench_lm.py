"""Times lm-eval on the engine beside lm-eval's own `hf` model: samples per second of one task, with runs of the two in turn.

Takes: a task. Gives: a row per batch size of `hf` and one per quantizer, with every run's time and the score.
Does not know about: whether a difference between scores means anything.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import console, number, show
from experiments.lm import tasks as lm_tasks
from experiments.lm.text import with_tokenizer
from experiments.measuring import engines
from experiments.measuring.scales import provide
from qkv.models import load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.validate import require


@dataclass
class _Contestant:
    """Who is timed. run: evaluates the task once, with an empty prefix cache, and returns lm-eval's result, which has a "qkv"."""

    label: str
    run: Callable[[], dict[str, Any]]
    row: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)


@EXPERIMENTS.register("bench_lm")
@dataclass
class BenchLM(Experiment):
    """See conf/experiment/bench_lm.yaml for every field."""

    tasks: list[str] = field(default_factory=lambda: ["next_passage"])
    quantizers: list[Any] = field(default_factory=lambda: ["none", "int8"])
    limit: int | None = 50
    hf_batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    repeats: int = 3
    calibration_documents: int = 16
    tokens_per_document: int = 1024

    def __post_init__(self) -> None:
        require(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1, or null")
        require(all(size >= 1 for size in self.hf_batch_sizes), "hf_batch_sizes", self.hf_batch_sizes, "each at least 1")
        require(len(self.tasks) == 1, "tasks", self.tasks, "one task")

    def check(self) -> None:
        for spec in self.quantizers:
            QUANTIZERS.build(spec)

    def run(self, run: Run) -> None:
        lm_tasks.require_lm_eval()
        from lm_eval.models.huggingface import HFLM

        from experiments.lm import evaluate
        from experiments.lm.model import QkvLM

        ((name, task),) = lm_tasks.load(lm_tasks.manager(self.tasks, [], {}), self.tasks).items()
        loaded, settings = with_tokenizer(load_model(run.engine.model)), evaluate.Settings(self.limit)
        contestants: list[_Contestant] = []
        with ExitStack() as stack:
            for spec in self.quantizers:
                quantizer = QUANTIZERS.build(spec)
                scales, origin = provide(run, loaded, quantizer, self.calibration_documents, self.tokens_per_document, 0)
                engine = stack.enter_context(engines.build(run.engine, loaded, spec, scales))
                if "model" not in run.record.data:
                    run.record.set("model", engines.model_part(loaded, engine))
                lm = QkvLM(engine, progress=False)
                row = {"policy": engines.policy_part(run.engine, spec, origin), "attention": engine.metrics()["attention"]}
                label = f"qkv {engines.label(spec)}"
                contestants.append(_Contestant(label, lambda lm=lm: evaluate.run(lm, name, task, settings), row))  # type: ignore[misc]
            plain = with_tokenizer(
                load_model(run.engine.model)
            )  # loaded again, since the engines have replaced the first one's attention
            for size in self.hf_batch_sizes:
                hf = HFLM(pretrained=plain.model, tokenizer=plain.tokenizer, batch_size=size, device=run.engine.model.device)
                contestants.append(
                    _Contestant(f"hf batch {size}", lambda hf=hf: evaluate.timed(hf, name, task, settings), {})  # type: ignore[misc]
                )
            self._take_turns(run, contestants)
        self._show(run, name, contestants)

    def _take_turns(self, run: Run, contestants: list[_Contestant]) -> None:
        """Run all contestants once, then all again, and so on, so that what else the machine does slows all alike. The first
        round only warms up."""
        with tqdm(total=(self.repeats + 1) * len(contestants), disable=not run.progress, unit="run", leave=False) as bar:
            for turn in range(self.repeats + 1):
                for one in contestants:
                    bar.set_description(one.label)
                    one.result = one.run()
                    if turn:
                        one.seconds.append(one.result["qkv"]["seconds"])
                    bar.update()
        for one in contestants:
            facts, middle = one.result["qkv"], statistics.median(one.seconds)
            one.row |= {
                "label": one.label,
                "speed": {"samples_per_s": facts["samples"] / middle, "seconds": middle, "runs_seconds": one.seconds},
                "evaluation": {key: value for key, value in facts.items() if key != "seconds"},
            }
            run.add_row(one.row)

    def _show(self, run: Run, task: str, contestants: list[_Contestant]) -> None:
        best = max((one.row["speed"]["samples_per_s"] for one in contestants if one.label.startswith("hf")), default=None)
        metric = next(key for key in contestants[0].result["results"][task] if "," in key)
        cells = []
        for one in contestants:
            rate = one.row["speed"]["samples_per_s"]
            one.row["speed"]["speedup_vs_hf"] = rate / best if best else None
            spread = f"{min(one.seconds):.1f}-{max(one.seconds):.1f}"
            value = one.result["results"][task][metric]
            prefill = one.row["evaluation"].get("prefill_tokens")
            cells.append([one.label, number(rate, 2), spread, number(best and rate / best, 2), number(prefill), number(value, 4)])
        run.record.save()
        samples = contestants[0].row["evaluation"]["samples"]
        title = f"{task}, {samples} samples, {run.engine.model.dtype}, {self.repeats} runs each, by turns"
        show(title, ["model", "samples/s", "s per run", "x hf", "tokens run", metric.split(",")[0]], cells)
        console().print("samples/s: of the median run. x hf: against the fastest batch size of lm-eval's hf model.")
