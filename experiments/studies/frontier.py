"""The frontier: effective bits against KL divergence and perplexity for every quantizer and setting, and the best per budget.

Takes: a list of settings. Gives: one row each, a table sorted by bits, a plot. Static scales are calibrated on one text, and all
settings are evaluated on another. All engines score a document before the next one comes, so that all rows share one baseline.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from calibration.fitting import search
from calibration.fitting.collect import quantizer_metadata
from calibration.fitting.gather import gather
from calibration.fitting.statistics import Statistics
from calibration.text.data import DATA, windows
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import frontier
from experiments.harness.table import console, number, show
from experiments.measuring import engines
from experiments.measuring.bits import bits, on_frontier
from experiments.measuring.divergence import Accuracy, score_document
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv.validate import from_mapping, require

_SUMS, _STATISTICS = "sums.json", "statistics.safetensors"  # what a run leaves for the one that resumes it
SINK_TOKENS = 4  # first tokens of every calibration document, which percentile and mse do not clip


@dataclass(frozen=True)
class Setting:
    """What one row measures. method, percentile: how static scales are found. block_size: None takes the allocator's."""

    quantizer: Any
    method: search.Method = "absmax"
    percentile: float = 99.9
    block_size: int | None = None

    @classmethod
    def of(cls, spec: Any) -> "Setting":
        """From a quantizer (a name, or a mapping with `name`), or from a mapping of these fields. Raises ConfigError."""
        whole = isinstance(spec, Mapping) and "name" not in spec
        return from_mapping(cls, spec, "settings") if whole else cls(spec)

    @property
    def label(self) -> str:
        method = "" if self.method == "absmax" else f" {self.method}"
        block = f" block {self.block_size}" if self.block_size else ""
        return f"{engines.label(self.quantizer)}{method}{block}"


@dataclass
class _Case:
    """fraction: of reads that came from the cache, over the documents so far."""

    setting: Setting
    row: dict[str, Any]
    accuracy: Accuracy = field(default_factory=Accuracy)
    fraction: float | None = None

    def summarize(self) -> None:
        self.row["accuracy"] = self.accuracy.part({"fraction_read_from_cache": self.fraction})


@EXPERIMENTS.register("frontier")
@dataclass
class Frontier(Experiment):
    """See conf/experiment/frontier.yaml for every field."""

    settings: list[Any] = field(default_factory=lambda: ["int8"])
    calibration: dict[str, Any] = field(default_factory=lambda: {"name": "business"})
    calibration_documents: int = 32
    documents: int = 32
    tokens_per_document: int = 1024
    budgets: list[float] = field(default_factory=lambda: [4.0, 4.6, 5.1, 8.13])
    resume: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.settings), "settings", self.settings, "at least one quantizer")
        for name in ("calibration_documents", "documents"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.tokens_per_document >= 2, "tokens_per_document", self.tokens_per_document, "at least 2")

    def check(self) -> None:
        self._settings = [Setting.of(spec) for spec in self.settings]
        for setting in self._settings:
            QUANTIZERS.build(setting.quantizer)
        labels = [s.label for s in self._settings]
        if len(set(labels)) < len(labels):
            raise ConfigError(f"settings: each at most once, got {', '.join(labels)}")
        self._calibration = DATA.build(self.calibration)
        if self.resume is not None and not any((Path(self.resume) / name).is_file() for name in (_SUMS, _STATISTICS)):
            raise ConfigError(f"resume: '{self.resume}' holds no {_SUMS}; give the folder of a run that was interrupted")

    def run(self, run: Run) -> None:
        loaded = load_model(run.engine.model)
        engines.require_positions(loaded, self.tokens_per_document, "tokens_per_document")
        documents = windows(run.data, loaded.tokenizer, self.documents, self.tokens_per_document, run.engine.seed)
        config = engines.single_document(run.engine, self.tokens_per_document + 1)  # calibration asks for one new token
        own = Accuracy()
        cases = [_Case(setting, {}) for setting in self._settings]
        identity = xxhash.xxh3_128_hexdigest(json.dumps([loaded.fingerprint, documents, self.calibration]).encode())
        done = self._resumed(run.folder, identity, own, cases)
        with ExitStack() as open_engines:
            baseline = engines.build(config, loaded, "none")
            open_engines.callback(baseline.close)
            run.record.set("model", engines.model_part(loaded, baseline))
            statistics = self._calibrate(run, loaded, baseline)
            others: list[tuple[Engine, Accuracy]] = []
            for case in cases:
                engine = self._engine(run, loaded, case, statistics)
                open_engines.callback(engine.close)
                others.append((engine, case.accuracy))
                run.record.add_row(case.row)
            with tqdm(total=len(documents), initial=done, disable=not run.progress, unit="document", leave=False) as bar:
                for i, document in enumerate(documents[done:], done + 1):
                    score_document(document, baseline, others, own)
                    for case, (engine, _) in zip(cases, others, strict=True):
                        case.fraction = engine.metrics()["fraction_read_from_cache"]
                        case.summarize()
                    self._keep(run.folder, identity, i, own, cases)
                    run.record.save()
                    bar.update()
        for case in cases:
            case.summarize()
            run.logger.row(case.row)
        self._show(run, loaded, cases)

    def _calibrate(self, run: Run, loaded: LoadedModel, engine: Engine) -> Statistics | None:
        """The statistics of keys and values that all settings together need, from one pass; None if none needs any."""
        if not any(QUANTIZERS.build(s.quantizer).needs_scales for s in self._settings):
            return None
        count, length = self.calibration_documents, self.tokens_per_document
        text = windows(self._calibration, loaded.tokenizer, count, length, run.engine.seed)
        checkpoint = run.folder / _STATISTICS
        with tqdm(total=count * length, disable=not run.progress, unit=" tokens", leave=False, desc="calibrating") as bar:
            return gather(engine, text, SINK_TOKENS, checkpoint, every=8, progress=bar.update)

    def _engine(self, run: Run, loaded: LoadedModel, case: _Case, statistics: Statistics | None) -> Engine:
        setting, config = case.setting, run.engine
        quantizer = QUANTIZERS.build(setting.quantizer)
        scales, origin = None, None
        if setting.block_size:
            config = replace(config, allocator=config.allocator | {"block_size": setting.block_size})
        config = engines.single_document(config, self.tokens_per_document)
        if quantizer.needs_scales:
            assert statistics is not None
            shapes = engines.build(config, loaded, "none")
            try:
                tensors = search.tensors(quantizer, statistics.layers, shapes.layers, setting.method, setting.percentile)
            finally:
                shapes.close()
            scales = ScaleFile(tensors, statistics.metadata | quantizer_metadata(quantizer, setting.method))
            origin = f"{setting.method}: {self.calibration_documents} documents of {self._calibration.name}"
        engine = engines.build(config, loaded, setting.quantizer, scales)
        metrics = engine.metrics()
        run.record.data.setdefault("attention", metrics["attention"])
        case.row |= {
            "label": setting.label,
            "policy": engines.policy_part(config, setting.quantizer, origin),
            "attention": metrics["attention"],
            "memory": metrics["memory"],
            "warnings": metrics["warnings"],
        }
        return engine

    def _resumed(self, folder: Path, identity: str, own: Accuracy, cases: Sequence[_Case]) -> int:
        """Documents that a former run has scored. Its sums are taken over, and what it has kept is copied here, so that this
        run can be resumed too. Raises ConfigError if they are of another run."""
        if self.resume is None:
            return 0
        former = Path(self.resume)
        if former.resolve() != folder.resolve() and (former / _STATISTICS).is_file():
            shutil.copy(former / _STATISTICS, folder / _STATISTICS)
        if not (former / _SUMS).is_file():
            return 0
        kept = json.loads((former / _SUMS).read_text(encoding="utf-8"))
        missing = [case.setting.label for case in cases if case.setting.label not in kept["settings"]]
        if kept["identity"] != identity or missing:
            raise ConfigError(
                f"resume: '{self.resume}' ran "
                + (f"without {', '.join(missing)}" if missing else "another model, text or calibration")
                + "; start anew without resume"
            )
        for accuracy, values in [(own, kept["none"]), *((c.accuracy, kept["settings"][c.setting.label]) for c in cases)]:
            for name, value in values.items():
                setattr(accuracy, name, value)
        for case in cases:
            case.fraction = kept.get("fractions", {}).get(case.setting.label)
        self._keep(folder, identity, int(kept["done"]), own, cases)
        return int(kept["done"])

    def _keep(self, folder: Path, identity: str, done: int, own: Accuracy, cases: Sequence[_Case]) -> None:
        settings = {case.setting.label: asdict(case.accuracy) for case in cases}
        fractions = {case.setting.label: case.fraction for case in cases}
        part = folder / f"{_SUMS}.part"
        sums = {"identity": identity, "done": done, "none": asdict(own), "settings": settings, "fractions": fractions}
        part.write_text(json.dumps(sums), encoding="utf-8")
        part.replace(folder / _SUMS)

    def _show(self, run: Run, loaded: LoadedModel, cases: Sequence[_Case]) -> None:
        rows = sorted((case.row for case in cases), key=lambda r: (bits(r), r["accuracy"]["kl_divergence"]))
        best = on_frontier(rows)
        title = (
            f"KV quantizers on {loaded.name} ({run.engine.model.dtype}): {self.documents} x {self.tokens_per_document} tokens of "
            f"{run.data.name}, static scales from {self._calibration.name}"
        )
        columns = ["setting", "bits K/V", "bits", "KL", "± KL", "top-1", "ΔPPL", "± ΔPPL", "best"]
        show(title, columns, [_cells(row, row in best) for row in rows])
        lines = [f"best: no setting with as few bits has a smaller KL divergence. {attention_line(run)}"]
        for budget in sorted(self.budgets):
            fitting = [row for row in rows if bits(row) <= budget]
            if fitting:
                row = min(fitting, key=lambda r: r["accuracy"]["kl_divergence"])
                a = row["accuracy"]
                lines.append(
                    f"up to {budget:g} bits: {row['label']} ({bits(row):.3f} bits, KL {a['kl_divergence']:.5f}, top-1 "
                    f"{100 * a['top1_agreement']:.1f} %, perplexity {a['perplexity_delta_pct']:+.2f} %)"
                )
        console().print("\n".join(lines))
        points = [
            (row["label"], bits(row), row["accuracy"]["kl_divergence"], row["accuracy"]["perplexity_delta_pct"]) for row in rows
        ]
        frontier(run.folder / "frontier.png", points, [row["label"] for row in best], title)


def attention_line(run: Run) -> str:
    backends = sorted({row["attention"]["backend"] for row in run.record.data["rows"]})
    return f"attention: {', '.join(backends)} backend, reads {run.engine.attention.reads}."


def _cells(row: dict[str, Any], best: bool) -> list[str]:
    memory, a = row["memory"], row["accuracy"]
    return [
        row["label"],
        f"{number(memory['effective_bits_k'], 2)}/{number(memory['effective_bits_v'], 2)}",
        number(bits(row), 3),
        number(a["kl_divergence"], 5),
        number(a.get("kl_divergence_stderr"), 5),
        number(100 * a["top1_agreement"], 2, suffix=" %"),
        number(a["perplexity_delta_pct"], 2, signed=True, suffix=" %"),
        number(a.get("perplexity_delta_pct_stderr"), 2, suffix=" %"),
        "*" if best else "",
    ]
