"""Runs lm-eval's tasks through every quantizer's cache and compares with `none`: is there a loss, and would so many samples have
shown one?

Takes: names of tasks and quantizers. Gives: one row per quantizer with every task's score, paired test and verdict; the samples
that flipped; and perplexity, KL divergence and top-1 agreement, beside the KL divergence between two schedules of the same
quantizer, which is the noise floor. Finished tasks are kept, so that `resume` can continue an interrupted run.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from calibration.text.data import windows
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.lm import findings
from experiments.lm import tasks as lm_tasks
from experiments.lm.kept import Kept
from experiments.lm.text import with_tokenizer
from experiments.measuring import engines
from experiments.measuring.divergence import Accuracy, score_document
from experiments.measuring.scales import given, provide, used_by
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv.validate import require

OTHER_CHUNK = 50  # the second schedule has at most so many tokens per forward


@dataclass
class _Case:
    """One quantizer of the comparison. scores: by task. scales: the scales and, in words, where they come from; None as long as
    they were not needed."""

    spec: engines.Spec
    row: dict[str, Any]
    scales: tuple[ScaleFile | None, str | None] | None = None
    scores: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return engines.label(self.spec)


@dataclass
class _Shared:
    """What the steps of a run share. judged: all entries of tasks in rows, each with its test; the tests count as one family."""

    run: Run
    loaded: LoadedModel
    cases: list[_Case]
    kept: Kept
    judged: list[Any] = field(default_factory=list)
    flips: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # lm-eval's, by quantizer and task


@EXPERIMENTS.register("accuracy")
@dataclass
class AccuracyExperiment(Experiment):
    """See conf/experiment/accuracy.yaml for every field."""

    tasks: list[str] = field(default_factory=lambda: ["next_passage", "last_word", "tool_call", "long_text"])
    quantizers: list[Any] = field(default_factory=lambda: ["none", "fp8", "int8", "int4"])
    task_metrics: dict[str, str] = field(default_factory=lambda: {"tool_call": "call"})
    limit: int | None = 200
    num_fewshot: int | None = None
    chat: bool = False
    task: dict[str, Any] = field(default_factory=dict)
    task_folders: list[str] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)
    documents: int = 8
    schedule_documents: int = 2
    tokens_per_document: int = 1024
    calibration_documents: int = 16
    least_read_from_cache: float = 0.5
    resume: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.tasks), "tasks", self.tasks, "at least one task")
        require(bool(self.quantizers), "quantizers", self.quantizers, "at least one quantizer")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1, or null for all samples")
        require(self.num_fewshot is None or self.num_fewshot >= 0, "num_fewshot", self.num_fewshot, "at least 0, or null")
        for name in ("documents", "calibration_documents"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        within = 0 <= self.schedule_documents <= self.documents
        require(within, "schedule_documents", self.schedule_documents, f"0 to documents={self.documents}")
        require(self.tokens_per_document >= 2, "tokens_per_document", self.tokens_per_document, "at least 2")
        require(0 <= self.least_read_from_cache <= 1, "least_read_from_cache", self.least_read_from_cache, "0 to 1")

    def check(self) -> None:
        for spec in self.quantizers:
            QUANTIZERS.build(spec)
        self._specs = ["none", *(spec for spec in self.quantizers if engines.label(spec) != "none")]
        for name, values in (("quantizers", [engines.label(spec) for spec in self._specs]), ("tasks", self.tasks)):
            if len(set(values)) < len(values):
                raise ConfigError(f"{name}: each at most once, got {', '.join(values)}")
        if self.resume is not None and not (Path(self.resume) / "tasks").is_dir():
            raise ConfigError(f"resume: '{self.resume}' holds no finished tasks; give the folder of a run that was interrupted")

    def run(self, run: Run) -> None:
        lm_tasks.require_lm_eval()
        used_by(run, [QUANTIZERS.build(spec) for spec in self._specs])
        tasks = self._load_tasks(run.engine)
        loaded = with_tokenizer(load_model(run.engine.model))
        engines.require_positions(loaded, self.tokens_per_document, "tokens_per_document")
        documents = windows(run.data, loaded.tokenizer, self.documents, self.tokens_per_document, run.engine.seed)
        kept = Kept(run.folder, self.resume, self._settings(run, loaded, tasks))
        shared = _Shared(run, loaded, [_Case(spec, {}) for spec in self._specs], kept)
        for case in shared.cases:
            self._run_tasks(shared, case, tasks)
        self._measure_divergence(shared, documents)
        self._finish(shared)

    def _load_tasks(self, config: EngineConfig) -> dict[str, Any]:
        """The tasks by name. The setting `task` has lm-eval's metadata, for all tasks or, under a task's name, for that task;
        RULER also reads the model's name there."""
        common = {"model": config.model.path or config.model.id or config.model.name}
        common |= {key: value for key, value in self.task.items() if not isinstance(value, Mapping)}
        tasks: dict[str, Any] = {}
        groups = {name: [name] for name in self.tasks if name in self.task}
        for names in [*groups.values(), [name for name in self.tasks if name not in groups]]:
            own = {name: self.task[name] for name in names if name in self.task}
            metadata = common | own | {key: value for values in own.values() for key, value in values.items()}
            tasks |= lm_tasks.load(lm_tasks.manager(names, self.task_folders, metadata), names)
        order = {name: i for i, name in enumerate(self.tasks)}
        return dict(sorted(tasks.items(), key=lambda item: order.get(item[0], len(order))))

    def _settings(self, run: Run, loaded: LoadedModel, tasks: Mapping[str, Any]) -> dict[str, Any]:
        """All settings and versions that a task's result depends on; results are kept under their hash."""
        config, scales = run.engine, given(run)
        own = ("limit", "num_fewshot", "chat", "task", "generation", "documents", "schedule_documents", "tokens_per_document")
        return {
            "model": [loaded.fingerprint, config.model.dtype],
            "engine": [config.allocator, config.attention, config.runner, config.scheduler, config.seed],
            "scales": [scales and scales.fingerprint(), self.calibration_documents, run.record.data["config"].get("data")],
            "quantizers": [engines.settings(QUANTIZERS.build(spec)) for spec in self._specs],
            "tasks": sorted(tasks),
            "own": {key: getattr(self, key) for key in own},
            "lm_eval": importlib.metadata.version("lm_eval"),
        }

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _run_tasks(self, shared: _Shared, case: _Case, tasks: Mapping[str, Any]) -> None:
        from experiments.lm import evaluate, pairs
        from experiments.lm.model import QkvLM

        run, base = shared.run, shared.cases[0]
        settings = evaluate.Settings(self.limit, self.num_fewshot, self.chat, self.generation)
        comparisons = len(tasks) * (len(shared.cases) - 1)
        with ExitStack() as stack:
            bar = stack.enter_context(tqdm(total=len(tasks), disable=not run.progress, unit="task", leave=False))
            lm: QkvLM | None = None
            for name, task in tasks.items():
                bar.set_description(f"{case.label}: {name}")
                result = shared.kept.get(case.label, name)
                if result is None:
                    if lm is None:
                        engine = stack.enter_context(self._engine(shared, case, run.engine))
                        run.watch(engine)
                        lm = QkvLM(engine, progress=run.progress)
                    result = evaluate.run(lm, name, task, settings)
                    shared.kept.put(case.label, name, result)
                scores = case.scores[name] = evaluate.scores(result, name, self.task_metrics.get(name))
                entry = pairs.entry(scores, result["qkv"], self.least_read_from_cache, run.engine.attention.reads)
                if case is not base:
                    more, test = pairs.against(base.scores[name], scores, run.engine.seed, comparisons)
                    entry |= more
                    shared.judged.append((entry, test))
                    shared.flips += pairs.flips(base.scores[name], scores, case.label, name)
                    pairs.judge(shared.judged, comparisons)
                self._row(shared, case)["accuracy"]["tasks"][name] = entry
                shared.results.setdefault(case.label, {})[name] = result
                run.record.save()
                bar.update()

    def _engine(self, shared: _Shared, case: _Case, config: EngineConfig) -> Engine:
        run = shared.run
        if case.scales is None:
            count, length = self.calibration_documents, self.tokens_per_document
            case.scales = provide(run, shared.loaded, QUANTIZERS.build(case.spec), count, length, self.documents)
        engine = engines.build(config, shared.loaded, case.spec, case.scales[0])
        if "model" not in run.record.data:
            run.record.set("model", engines.model_part(shared.loaded, engine))
        metrics = engine.metrics()
        run.record.data.setdefault("attention", metrics["attention"])
        self._row(shared, case).update(
            policy=engines.policy_part(run.engine, case.spec, case.scales[1]),
            attention=metrics["attention"],
            memory=metrics["memory"] | case.row.get("memory", {}),
            warnings=metrics["warnings"],
        )
        return engine

    def _row(self, shared: _Shared, case: _Case) -> dict[str, Any]:
        if not case.row:
            case.row |= {"label": case.label, "accuracy": {"tasks": {}}}
            shared.run.record.add_row(case.row)
        return case.row

    # -- perplexity, KL, top-1 agreement -----------------------------------------------------------------------------

    def _measure_divergence(self, shared: _Shared, documents: list[list[int]]) -> None:
        """Add to the rows how far each quantizer is from `none`, document by document for all together, and how far it is from
        itself when documents are cut into other chunks."""
        config = engines.single_document(shared.run.engine, self.tokens_per_document)
        chunked = replace(config.scheduler, max_num_batched_tokens=OTHER_CHUNK, max_num_scored_tokens=OTHER_CHUNK)
        with ExitStack() as stack:
            contenders = [stack.enter_context(self._engine(shared, case, config)) for case in shared.cases]
            sums = [Accuracy() for _ in contenders]
            total = len(documents) + len(contenders) * self.schedule_documents
            bar = stack.enter_context(tqdm(total=total, disable=not shared.run.progress, unit="document", leave=False))
            for document in documents:
                score_document(document, contenders[0], list(zip(contenders[1:], sums[1:], strict=True)), sums[0])
                bar.update()
            for case, engine, accuracy in zip(shared.cases, contenders, sums, strict=True):
                case.row["accuracy"] |= accuracy.part(engine.metrics())
            for case, engine in zip(shared.cases, contenders, strict=True):
                if not self.schedule_documents:
                    continue
                noise = Accuracy()
                with self._engine(shared, case, replace(config, scheduler=chunked)) as other:
                    for document in documents[: self.schedule_documents]:
                        score_document(document, engine, [(other, noise)], Accuracy())
                        bar.update()
                    case.row["accuracy"]["schedule_kl"] = max(0.0, noise.part(other.metrics())["kl_divergence"])
                shared.run.record.save()

    def _finish(self, shared: _Shared) -> None:
        from experiments.lm import logs

        run, record = shared.run, shared.run.record.data
        for case in shared.cases:
            run.logger.row(case.row)
        (run.folder / "flips.json").write_text(json.dumps(shared.flips, indent=1), encoding="utf-8")
        found = findings.tables(record, shared.flips)
        findings.print_tables(found)
        findings.plot(record, run.folder / "frontier.png")
        findings.write(record, shared.flips, run.folder / "accuracy.html")
        logs.track(run.folder / "lm_eval", shared.loaded.name, shared.results)
        for table in found:
            run.logger.table(table.name, table.columns, table.rows)
        run.logger.lm_eval(logs.merged(shared.results))
