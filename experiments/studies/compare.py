"""Measures what each KV quantizer costs and saves on one model and one text: memory, speed, accuracy against `none`.

Takes: a list of quantizers. Gives: one row each, a table, a bar chart. The model is loaded once. Speed is measured with one
engine at a time; accuracy with all at once: every engine scores a document before the next document comes.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from calibration.text.data import windows
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import bars
from experiments.harness.table import console, number, show
from experiments.measuring import engines
from experiments.measuring.divergence import Accuracy, score_document
from experiments.measuring.scales import provide, used_by
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv.validate import require

_HALF = ("bfloat16", "float16")


@dataclass
class _Case:
    """One quantizer of the comparison."""

    spec: engines.Spec
    row: dict[str, Any]
    scales: ScaleFile | None = None
    accuracy: Accuracy = field(default_factory=Accuracy)

    @property
    def label(self) -> str:
        return engines.label(self.spec)


@EXPERIMENTS.register("compare")
@dataclass
class Compare(Experiment):
    """quantizers: names or {name: ..., field: value}; `none` is always measured, first, as the baseline.

    documents, tokens_per_document: windows of text that are scored. calibration_documents: how many further windows are used
    for quantizers that need scales and have no file.
    """

    plain_workload = True

    quantizers: list[Any] = field(default_factory=lambda: ["none"])
    documents: int = 16
    tokens_per_document: int = 1024
    calibration_documents: int = 16

    def __post_init__(self) -> None:
        require(bool(self.quantizers), "quantizers", self.quantizers, "at least one quantizer")
        require(self.documents >= 1, "documents", self.documents, "at least 1")
        require(self.tokens_per_document >= 2, "tokens_per_document", self.tokens_per_document, "at least 2")
        require(self.calibration_documents >= 1, "calibration_documents", self.calibration_documents, "at least 1")

    def check(self) -> None:
        for spec in self.quantizers:
            QUANTIZERS.build(spec)
        labels = [engines.label(spec) for spec in self.quantizers]
        if len(set(labels)) < len(labels):
            raise ConfigError(f"quantizers: each at most once, got {', '.join(labels)}")

    def run(self, run: Run) -> None:
        specs = ["none", *(s for s in self.quantizers if engines.label(s) != "none")]
        used_by(run, [QUANTIZERS.build(spec) for spec in specs])
        loaded = load_model(run.engine.model)
        engines.require_positions(loaded, self.tokens_per_document, "tokens_per_document")
        cases = [_Case(spec, {}) for spec in specs]
        documents = windows(run.data, loaded.tokenizer, self.documents, self.tokens_per_document, run.engine.seed)
        try:
            with tqdm(total=len(cases) * (1 + len(documents)), disable=not run.progress, unit="part", leave=False) as bar:
                self._measure_speed(run, loaded, cases, bar)
                self._measure_accuracy(run, loaded, cases, documents, bar)
        finally:
            for case in cases:
                if case.row:
                    run.logger.row(case.row)
        self._show(run, loaded, cases)

    def _measure_speed(self, run: Run, loaded: LoadedModel, cases: list[_Case], bar: Any) -> None:
        work = run.workload
        prompts = windows(run.data, loaded.tokenizer, work.num_requests + 1, work.prompt_tokens, run.engine.seed + 1, cycle=True)
        for case in cases:
            bar.set_description(f"{case.label}: speed")
            case.scales, origin = provide(
                run, loaded, QUANTIZERS.build(case.spec), self.calibration_documents, self.tokens_per_document, self.documents
            )
            engine = engines.build(run.engine, loaded, case.spec, case.scales)
            run.watch(engine)
            try:
                if "model" not in run.record.data:
                    run.record.set("model", engines.model_part(loaded, engine))
                metrics = engines.run_workload(engine, prompts[0], prompts[1:], work)
            finally:
                engine.close()
            run.record.data.setdefault("attention", metrics["attention"])
            case.row |= {
                "label": case.label,
                "policy": engines.policy_part(run.engine, case.spec, origin),
                "attention": metrics["attention"],
                "memory": metrics["memory"],
                "speed": metrics["speed"],
                "cache": metrics["cache"],
                "warnings": metrics["warnings"],
            }
            run.record.add_row(case.row)
            bar.update()

    def _measure_accuracy(self, run: Run, loaded: LoadedModel, cases: list[_Case], documents: list[list[int]], bar: Any) -> None:
        config = engines.single_document(run.engine, self.tokens_per_document)
        with ExitStack() as open_engines:
            contenders: list[Engine] = []
            for case in cases:
                contenders.append(engines.build(config, loaded, case.spec, case.scales))
                open_engines.callback(contenders[-1].close)
            others = [(engine, case.accuracy) for engine, case in zip(contenders[1:], cases[1:], strict=True)]
            for i, document in enumerate(documents):
                bar.set_description(f"accuracy: document {i + 1} of {len(documents)}")
                score_document(document, contenders[0], others, cases[0].accuracy)
                for engine, case in zip(contenders, cases, strict=True):
                    case.row["accuracy"] = case.accuracy.part(engine.metrics())
                run.record.save()
                bar.update(len(cases))

    def _show(self, run: Run, loaded: LoadedModel, cases: list[_Case]) -> None:
        dtype, work = run.engine.model.dtype, run.workload
        title = f"KV quantizers on {loaded.name} ({dtype}), text: {run.data.name}"
        columns = ["quantizer", "bits K/V", "KV B/token", "capacity", "prefill tok/s", "decode tok/s", "TTFT p50 s"]
        columns += ["PPL", "ΔPPL", "KL", "top-1", "from cache"]
        pool = cases[0].row["memory"].get("pool_bytes")
        backends = sorted({case.row["attention"]["backend"] for case in cases})
        show(title, columns, [_cells(case.row) for case in cases])
        lines = [
            f"capacity: tokens that fit the pool of {number(pool and pool / 2**20, 0)} MiB, the same for every row. "
            f"attention: {', '.join(backends)} backend, reads {run.engine.attention.reads}.",
            f"speed: {work.num_requests} requests at once, {work.prompt_tokens} tokens in, {work.output_tokens} out. "
            f"accuracy: {self.documents} x {self.tokens_per_document} tokens against none, teacher-forced through the cache.",
        ]
        if dtype in _HALF:
            lines.append(
                f"{dtype}: weights and arithmetic have 16 bits, for speed and memory. Its own rounding (a last bit that flips a "
                "code changes what follows) is part of ΔPPL and KL; for differences as small as int8's, use model.dtype=float32."
            )
        console().print("\n".join(lines))
        rows = [case.row for case in cases]
        panels = {
            "KV bytes per token": [r["memory"].get("kv_bytes_per_token") for r in rows],
            "decode tokens/s": [r["speed"].get("decode_tokens_per_s") for r in rows],
            "KL to none (nats)": [r["accuracy"].get("kl_divergence") for r in rows],
            "top-1 agreement": [r["accuracy"].get("top1_agreement") for r in rows],
        }
        bars(run.folder / "compare.png", [case.label for case in cases], panels, title)


def _cells(row: dict[str, Any]) -> list[str]:
    memory, speed, accuracy = row["memory"], row["speed"], row["accuracy"]
    fraction, top1 = accuracy.get("fraction_read_from_cache"), accuracy["top1_agreement"]
    return [
        row["label"],
        f"{number(memory['effective_bits_k'], 2)}/{number(memory['effective_bits_v'], 2)}",
        number(memory["kv_bytes_per_token"], 0),
        number(memory["capacity_tokens"]),
        number(speed["prefill_tokens_per_s"], 0),
        number(speed.get("decode_tokens_per_s")),
        number(speed["ttft_s"]["p50"], 2),
        number(accuracy["perplexity"], 3),
        number(accuracy["perplexity_delta_pct"], 2, signed=True, suffix=" %"),
        number(accuracy["kl_divergence"], 5),
        number(100 * top1, 1, suffix=" %"),
        number(None if fraction is None else 100 * fraction, 1, suffix=" %"),
    ]
