"""Does it matter on what text scales are calibrated? Calibrates on each kind of text and evaluates on each.

Takes: names of data sources, a quantizer with static scales. Gives: one row per pair, a table and a heat map of KL divergences.
What to look at first: how much worse the other rows of a column are than its diagonal.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from calibration.fitting import search
from calibration.fitting.fit import fit, static_quantizer
from calibration.fitting.gather import observed
from calibration.text.data import DATA, DataSource
from calibration.text.sample import Sample, Sampling, draw
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import heat_map
from experiments.harness.table import number, show
from experiments.measuring import engines
from experiments.measuring.held_back import score
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import load_model
from qkv.policies.quantizer.base import Quantizer
from qkv.scales import ScaleFile


@EXPERIMENTS.register("calibration_matrix")
@dataclass
class CalibrationMatrix(Experiment):
    """sources: names of data options, or {name: ..., field: value}. method, percentile, sink_tokens: as in calibrate.

    sample: of every source, `documents` are for calibration and `held_back` for evaluation.
    """

    sources: list[Any] = field(default_factory=lambda: ["banking", "dialogues", "code", "briefs"])
    method: search.Method = "absmax"
    percentile: float = 99.9
    sink_tokens: int = 4
    sample: Sampling = field(default_factory=lambda: Sampling(documents=64, tokens=256, held_back=16))

    def check(self) -> None:
        if len(self.sources) < 2:
            raise ConfigError(f"sources: at least two are needed, got {self.sources}")
        if self.method == "output":
            raise ConfigError("method=output searches on documents; here use absmax, percentile or mse")
        for spec in self.sources:
            DATA.build(spec)

    def run(self, run: Run) -> None:
        quantizer = static_quantizer(run.engine.quantizer)
        loaded = load_model(run.engine.model)
        engines.require_positions(loaded, self.sample.tokens, "sample.tokens")
        sources: list[DataSource] = [DATA.build(spec) for spec in self.sources]
        samples = [draw(source, loaded.tokenizer, self.sample, run.engine.seed) for source in sources]
        held = [[d for d in sample.held_back if len(d) > 1] for sample in samples]
        if short := [source.name for source, documents in zip(sources, held, strict=True) if not documents]:
            raise ConfigError(f"sources: {', '.join(short)} has no document left to evaluate on; raise sample.held_back")
        total = sum(sum(map(len, s.calibration)) for s in samples) + (1 + len(sources)) * sum(len(d) for h in held for d in h)
        with tqdm(total=total, disable=not run.progress, unit=" tokens", leave=False) as bar:
            engine = engines.build(engines.whole_documents(run.engine, self.sample.tokens), loaded, "none")
            try:
                run.record.set("model", engines.model_part(loaded, engine))
                files = [self._calibrate(engine, quantizer, sample, bar) for sample in samples]
            finally:
                engine.close()
            matrix: list[list[dict[str, Any]]] = [[] for _ in sources]
            for target, documents in zip(sources, held, strict=True):
                bar.set_description(f"evaluating on {target.name}")
                for i, scored in enumerate(score(run.engine, loaded, documents, files, bar.update)):
                    matrix[i].append(scored.part)
                    row: dict[str, Any] = {"label": f"{sources[i].name} -> {target.name}"}
                    origin = f"calibrated on {sources[i].name}: {len(samples[i].calibration)} documents, {self.method}"
                    row |= {"policy": engines.policy_part(run.engine, run.engine.quantizer, origin), "accuracy": scored.part}
                    row |= {"attention": scored.attention, "memory": scored.memory, "warnings": scored.warnings}
                    run.add_row(row | {"calibrated_on": sources[i].name, "evaluated_on": target.name})
        self._show(run.folder / "calibration_matrix.png", quantizer, [s.name for s in sources], matrix)

    def _calibrate(self, engine: Engine, quantizer: Quantizer, sample: Sample, bar: Any) -> ScaleFile:
        statistics = observed(engine, sample.calibration, self.sink_tokens, bar.update)
        return fit(engine, statistics, quantizer, self.method, self.percentile)

    def _show(self, chart: Path, quantizer: Quantizer, names: list[str], matrix: list[list[dict[str, Any]]]) -> None:
        kl = [[part["kl_divergence"] for part in row] for row in matrix]
        title = f"KL to none of {quantizer.name} ({self.method}): rows calibrated on, columns evaluated on"
        cells = [[name, *(number(x, 5) for x in row)] for name, row in zip(names, kl, strict=True)]
        worst = [max(kl[i][j] for i in range(len(names))) / kl[j][j] if kl[j][j] > 0 else 1.0 for j in range(len(names))]
        cells.append(["worst row / diagonal", *(number(w, 2, suffix=" x") for w in worst)])
        show(title, ["calibrated on", *names], cells)
        heat_map(chart, names, names, kl, title, "evaluated on", "calibrated on")
