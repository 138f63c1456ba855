"""Finds static scales on the user's own data: writes a scale file, its statistics and a report, and checks the scales on
documents that were held back.

Takes: the settings of a run. Gives: files and one row. The work is done in calibration/; this file puts it in order.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from calibration.fitting import search
from calibration.fitting.advice import next_data
from calibration.fitting.diagnose import diagnose
from calibration.fitting.fit import fit, static_quantizer
from calibration.fitting.gather import gather
from calibration.fitting.report import write
from calibration.fitting.statistics import Statistics, statistics_path
from calibration.text.sample import Sample, Sampling, draw
from experiments.harness import cli
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.record import plain
from experiments.harness.table import console, number
from experiments.measuring import engines
from experiments.measuring.held_back import score, show_reading
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile
from qkv.validate import require

_ROW_IN_REPORT = 2000  # characters of a row that report.html shows
_DIAGNOSED = 8  # errors per layer and head are measured on so many documents
_REPORTED = ("model", "quantizer", "quantizer_fields", "method", "data", "documents", "tokens", "sampling")


@EXPERIMENTS.register("calibrate")
@dataclass
class Calibrate(Experiment):
    """See conf/experiment/calibrate.yaml for every field."""

    method: search.Method = "absmax"
    percentile: float = 99.9
    sink_tokens: int = 4
    out: str = "scales.safetensors"
    sample: Sampling = field(default_factory=Sampling)
    search_documents: int = 16
    checkpoint_every: int = 16

    def __post_init__(self) -> None:
        require(50 < self.percentile <= 100, "percentile", self.percentile, "above 50 and at most 100")
        require(
            0 <= self.sink_tokens < self.sample.tokens, "sink_tokens", self.sink_tokens, "at least 0, and less than sample.tokens"
        )
        require(self.out.endswith(".safetensors"), "out", self.out, "a file name that ends in .safetensors")
        require(self.search_documents >= 1, "search_documents", self.search_documents, "at least 1")
        require(self.checkpoint_every >= 1, "checkpoint_every", self.checkpoint_every, "at least 1")

    def run(self, run: Run) -> None:
        quantizer = static_quantizer(run.engine.quantizer)
        loaded = load_model(run.engine.model)
        engines.require_positions(loaded, self.sample.tokens, "sample.tokens")
        sample = draw(run.data, loaded.tokenizer, self.sample, run.engine.seed)
        show_reading(run.data.name, sample)
        config = engines.whole_documents(run.engine, self.sample.tokens)
        engine = engines.build(config, loaded, "none")
        try:
            run.record.set("model", engines.model_part(loaded, engine))
            statistics, scales = self._calibrate(run, engine, quantizer, sample)
            statistics.save(statistics_path(self.out))
            scales.save(self.out)
            report = self._check(run, loaded, engine, statistics, scales, sample)
        finally:
            engine.close()
        scales.save(self.out)  # again, now with what the check found
        write(run.folder, report)
        self._checkpoint.unlink(missing_ok=True)
        self._show(run, report)

    @property
    def _checkpoint(self) -> Path:
        return Path(self.out).with_name(Path(self.out).name.removesuffix(".safetensors") + ".checkpoint.safetensors")

    def _calibrate(self, run: Run, engine: Engine, quantizer: Quantizer, sample: Sample) -> tuple[Statistics, ScaleFile]:
        documents, searched = sample.calibration, []
        if self.method == "output":
            searched = documents[: self.search_documents]
        total = sum(map(len, [*documents, *searched]))
        with tqdm(
            total=total, disable=not run.progress, unit=" tokens", leave=False, desc=f"calibrating {engine.loaded.name}"
        ) as bar:
            statistics = gather(engine, documents, self.sink_tokens, self._checkpoint, self.checkpoint_every, bar.update)
            statistics.metadata |= {"data": run.data.name, "sampling": sample.how}
            if searched:
                bar.set_description("searching ranges")
            file = fit(engine, statistics, quantizer, self.method, self.percentile, searched, bar.update)
        return statistics, file

    def _check(
        self, run: Run, loaded: LoadedModel, engine: Engine, statistics: Statistics, scales: ScaleFile, sample: Sample
    ) -> dict[str, Any]:
        """Write the report: what stands out in the statistics, and the accuracy on documents that were held back."""
        quantizer = QUANTIZERS.build(run.engine.quantizer)
        looked_at = [d for d in sample.held_back or sample.calibration if len(d) > 1][:_DIAGNOSED]
        scored = [d for d in sample.held_back if len(d) > 1]
        total = sum(map(len, [*looked_at, *scored, *scored]))
        with tqdm(total=total, disable=not run.progress, unit=" tokens", leave=False, desc="checking") as bar:
            found = diagnose(engine, statistics.layers, quantizer, scales.tensors, looked_at, bar.update)
            row: dict[str, Any] = {
                "label": engines.label(run.engine.quantizer),
                "policy": engines.policy_part(run.engine, run.engine.quantizer, self.out),
            }
            if scored:
                (result,) = score(run.engine, loaded, scored, [scales], bar.update)
                row |= {
                    "attention": result.attention,
                    "memory": result.memory,
                    "accuracy": result.part,
                    "warnings": result.warnings,
                }
                run.record.data.setdefault("attention", result.attention)
            else:
                row |= {"memory": memory(run.engine, loaded, scales), "warnings": scales.warnings}
        check = {"saturation": {str(e["layer"]): e["saturation"] for e in found["layers"]}} | {
            key: row["accuracy"][key] for key in ("kl_divergence", "perplexity_delta_pct", "tokens_scored") if "accuracy" in row
        }
        scales.metadata["check"] = check
        row["calibration"] = {key: scales.metadata[key] for key in _REPORTED} | {"suggestions": found["suggestions"]}
        row["calibration"] |= {"reading": sample.report.as_dict()}
        run.add_row(row)
        reported = {key: scales.metadata[key] for key in _REPORTED} | {
            "reading": sample.report.line(),
            "warnings": row["warnings"],
        }
        reported |= {
            "first_rows": sample.report.shown(_ROW_IN_REPORT),
            "next_data": next_data(sample, self.sample.tokens, found["layers"]),
        }
        return plain(reported | {key: row[key] for key in ("memory", "accuracy") if key in row} | found)

    def _show(self, run: Run, report: dict[str, Any]) -> None:
        memory, accuracy = report["memory"], report.get("accuracy")
        lines = [
            f"{self.out}: {report['quantizer']}, {report['method']}, {report['documents']:,} documents, {report['tokens']:,} "
            f"tokens; K {memory['effective_bits_k']:.2f} and V {memory['effective_bits_v']:.2f} bits, "
            f"{number(memory['kv_bytes_per_token'], 0)} bytes per token"
        ]
        if accuracy:
            error = accuracy.get("perplexity_delta_pct_stderr")
            lines.append(
                f"on {accuracy['tokens_scored']:,} tokens held back, read through the cache: "
                f"KL {accuracy['kl_divergence']:.5f}, top-1 {100 * accuracy['top1_agreement']:.1f} %, "
                f"perplexity {accuracy['perplexity_delta_pct']:+.2f} %" + (f" ± {error:.2f}" if error is not None else "")
            )
        lines += [f"- {line}" for line in report["suggestions"]["lines"]]
        lines += [f"WARNING: {line}" for line in report["warnings"]]
        lines.append(f"report: {cli.shown(run.folder / 'report.html')}")
        console().print("\n".join(lines), soft_wrap=True, markup=False)


def memory(config: EngineConfig, loaded: LoadedModel, scales: ScaleFile) -> dict[str, Any]:
    """The `memory` part of the row: that of the configured quantizer, with a pool for one short document."""
    engine = engines.build(engines.single_document(config, 16), loaded, config.quantizer, scales)
    try:
        part: dict[str, Any] = engine.metrics()["memory"]
        return part
    finally:
        engine.close()
