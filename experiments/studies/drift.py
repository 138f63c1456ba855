"""Does a scale file still fit today's data? Compares it, on held-back documents, with a file calibrated on this data.

Takes: a scale file, data. Gives: saturation and reach per layer, what a new calibration would gain, and a verdict with its rule.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from calibration.fitting import search
from calibration.fitting.diagnose import diagnose
from calibration.fitting.fit import fit
from calibration.fitting.gather import observed
from calibration.text.sample import Sample, Sampling, draw
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import console, number, show
from experiments.measuring import engines
from experiments.measuring.divergence import Accuracy
from experiments.measuring.held_back import Scored, score, show_reading
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import LoadedModel, load_model
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile
from qkv.validate import require

_WORST = 8  # the table shows so many layers
_DIAGNOSED = 8
# Method of the new file, by that of the given one. `output` would need a search over documents; `mse` comes nearest without.
_AGAIN: dict[str, search.Method] = {"percentile": "percentile", "mse": "mse", "output": "mse"}


@dataclass
class _Found:
    """What was measured. layers: as diagnose() returns them. old: the scores of the given file. new: those of a file calibrated
    on the new data by the same method."""

    layers: list[dict[str, Any]]
    old: Scored
    new: Scored


@EXPERIMENTS.register("drift")
@dataclass
class Drift(Experiment):
    """See conf/experiment/drift.yaml for every field."""

    sample: Sampling = field(default_factory=lambda: Sampling(documents=64, held_back=32))
    gain: float = 1.25
    sigmas: float = 2.0

    def __post_init__(self) -> None:
        require(self.sample.held_back >= 2, "sample.held_back", self.sample.held_back, "at least 2, for a standard error")
        require(self.gain >= 1, "gain", self.gain, "at least 1")
        require(self.sigmas >= 0, "sigmas", self.sigmas, "at least 0")

    def run(self, run: Run) -> None:
        file = ScaleFile.of(run.engine.scales)
        if file is None:
            raise ConfigError("drift judges a scale file: add scales=FILE")
        name = file.metadata.get("quantizer")
        if name not in QUANTIZERS.names():
            raise ConfigError(
                f"scales: '{run.engine.scales}' is for quantizer '{name}', which is not one of: {', '.join(QUANTIZERS.names())}"
            )
        spec = {"name": name, **(file.metadata.get("quantizer_fields") or {})}
        run.engine, quantizer = replace(run.engine, quantizer=spec, scales=None), QUANTIZERS.build(spec)
        loaded = load_model(run.engine.model)
        engines.require_positions(loaded, self.sample.tokens, "sample.tokens")
        sample = draw(run.data, loaded.tokenizer, self.sample, run.engine.seed)
        scored = [d for d in sample.held_back if len(d) > 1]
        if len(scored) < 2:
            raise ConfigError(
                f"data {run.data.name}: {len(scored)} documents to judge on; drift needs at least 2 (sample.held_back)"
            )
        show_reading(run.data.name, sample)
        engine = engines.build(engines.whole_documents(run.engine, self.sample.tokens), loaded, "none")
        try:
            file.validate(engine.layers, quantizer.name, loaded.fingerprint, quantizer.static_tensors())
            run.record.set("model", engines.model_part(loaded, engine))
            found = self._look(run, loaded, engine, quantizer, file, sample, scored)
        finally:
            engine.close()
        verdict = judge(found.old.accuracy, found.new.accuracy, self.gain, self.sigmas)
        row = {"label": str(name), "policy": engines.policy_part(run.engine, spec, "given")}
        row |= {"attention": found.old.attention, "memory": found.old.memory, "accuracy": found.old.part}
        row |= {"warnings": [*file.warnings, *found.old.warnings]}
        row["drift"] = verdict | {
            "recalibrated": found.new.part,
            "calibrated_on": file.metadata.get("data"),
            "layers": found.layers,
        }
        run.add_row(row)
        self._show(run, file, found, verdict)

    def _look(
        self,
        run: Run,
        loaded: LoadedModel,
        engine: Engine,
        quantizer: Quantizer,
        file: ScaleFile,
        sample: Sample,
        scored: list[list[int]],
    ) -> _Found:
        documents, looked_at = sample.calibration, scored[:_DIAGNOSED]
        total = sum(map(len, [*documents, *looked_at])) + 3 * sum(map(len, scored))
        with tqdm(total=total, disable=not run.progress, unit=" tokens", leave=False, desc=f"reading {run.data.name}") as bar:
            statistics = observed(engine, documents, int(file.metadata.get("sink_tokens", 0)), bar.update)
            method = _AGAIN.get(file.metadata.get("method", ""), "absmax")
            keep = float(file.metadata.get("percentile", 100.0))
            fresh = fit(engine, statistics, quantizer, method, keep)
            found = diagnose(engine, statistics.layers, quantizer, file.tensors, looked_at, bar.update)
            old, new = score(run.engine, loaded, scored, [file, fresh], bar.update)
        return _Found(found["layers"], old, new)

    def _show(self, run: Run, file: ScaleFile, found: _Found, verdict: dict[str, Any]) -> None:
        before = (file.metadata.get("check") or {}).get("saturation") or {}
        sides = [side for side in "kv" if any(side in e["saturation"] for e in found.layers)]
        rows = []
        for e in sorted(found.layers, key=lambda e: -max(e["reach"].values(), default=0.0))[:_WORST]:
            cells = [str(e["layer"])]
            for side in sides:
                then = before.get(str(e["layer"]), {}).get(side)
                now, reach = e["saturation"].get(side), e["reach"].get(side)
                cells += ["-" if rate is None else f"{100 * rate:.3f} %" for rate in (now, then)]
                cells.append(number(reach, 2))
            rows.append(cells)
        names = [f"{s.upper()} {what}" for s in sides for what in ("saturated", "at calibration", "reach")]
        if sides:
            note = "reach: the furthest value, 1 being the end of the calibrated range"
            show(f"{run.data.name}: the layers that reach furthest", ["layer", *names], rows, note)
        for label, part in (("this file", found.old.part), ("calibrated on this data", found.new.part)):
            console().print(
                f"{label}: KL {part['kl_divergence']:.5f}, perplexity {part['perplexity_delta_pct']:+.2f} %, "
                f"top-1 {100 * part['top1_agreement']:.1f} % ({part['tokens_scored']:,} tokens held back)",
                soft_wrap=True,
            )
        console().print(f"verdict: {verdict['verdict']}: {verdict['why']}", soft_wrap=True)


def judge(old: Accuracy, new: Accuracy, gain: float, sigmas: float) -> dict[str, Any]:
    """The verdict, "keep" or "recalibrate", the reason with its rule (`why`), and the numbers.

    Recalibrate if the file's KL is above `gain` times that of a file calibrated on the new data, and the difference, paired by
    document, is above `sigmas` standard errors.
    """
    tokens = sum(old.tokens)
    kl, fresh = sum(old.kl) / tokens, sum(new.kl) / tokens
    difference = [a - b for a, b in zip(old.kl, new.kl, strict=True)]
    mean, n = sum(difference) / tokens, len(difference)
    squares = sum((d - mean * t) ** 2 for d, t in zip(difference, old.tokens, strict=True))
    error = math.sqrt(n / (n - 1) * squares) / tokens
    ratio = kl / fresh if fresh > 0 else (1.0 if kl <= 0 else math.inf)
    worse = ratio > gain and mean > sigmas * error
    why = (
        f"KL {kl:.5f} with this file against {fresh:.5f} calibrated on this data, {ratio:.2f} times as much, "
        f"{mean:+.6f} ± {error:.6f}; recalibrate when it is above {gain:g} times and above {sigmas:g} standard errors"
    )
    numbers = {"kl": kl, "kl_recalibrated": fresh, "ratio": ratio, "difference": mean, "difference_stderr": error}
    return {"verdict": "recalibrate" if worse else "keep", "why": why} | numbers
