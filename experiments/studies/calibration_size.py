"""How much text do static scales need? Calibrate on more and more tokens, judge each on the same held-back documents.

Takes: numbers of tokens, a quantizer with static scales. Gives: one row per number and repeat; the table shows their mean and the
worst. What a number costs is what it loses against the largest one.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from calibration.fitting.fit import fit, static_quantizer
from calibration.fitting.gather import observed
from calibration.text.sample import Sampling, draw
from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import number, show
from experiments.measuring import engines
from experiments.measuring.held_back import score
from qkv.errors import ConfigError
from qkv.models import load_model
from qkv.validate import require


@EXPERIMENTS.register("calibration_size")
@dataclass
class CalibrationSize(Experiment):
    """tokens: how many calibrate. repeats: of each number, on other documents. sample: of what they and the judges are drawn."""

    tokens: list[int] = field(default_factory=lambda: [1, 10, 100, 1000, 10000, 30000])
    repeats: int = 3
    sample: Sampling = field(default_factory=lambda: Sampling(held_back=32))

    def check(self) -> None:
        require(bool(self.tokens) and min(self.tokens, default=0) >= 1, "tokens", self.tokens, "numbers of at least 1")
        require(self.repeats >= 1, "repeats", self.repeats, "at least 1")

    def run(self, run: Run) -> None:
        quantizer, loaded = static_quantizer(run.engine.quantizer), load_model(run.engine.model)
        sample = draw(run.data, loaded.tokenizer, self.sample, run.engine.seed)
        held, there = [d for d in sample.held_back if len(d) > 1], sum(map(len, sample.calibration))
        if not held or there < max(self.tokens):
            raise ConfigError(
                f"tokens: {max(self.tokens):,} asked for, {there:,} drawn from {run.data.name}; raise sample.documents"
            )
        trials = [(n, _prefix(sample.calibration, n, repeat)) for n in self.tokens for repeat in range(self.repeats)]
        total = sum(n for n, _ in trials) + (1 + len(trials)) * sum(map(len, held))
        with tqdm(total=total, disable=not run.progress, unit=" tokens", leave=False, desc="calibrating") as bar:
            engine = engines.build(engines.whole_documents(run.engine, self.sample.tokens), loaded, "none")
            try:
                run.record.set("model", engines.model_part(loaded, engine))
                files = []
                for _, documents in trials:
                    statistics = observed(engine, documents, 0, bar.update)
                    files.append(fit(engine, statistics, quantizer, "absmax", 100.0))
            finally:
                engine.close()
            bar.set_description("scoring")
            results = score(run.engine, loaded, held, files, bar.update)
        for (n, _), scored in zip(trials, results, strict=True):
            row: dict[str, Any] = {"label": f"{n} tokens", "calibration_tokens": n, "accuracy": scored.part}
            row |= {
                "policy": engines.policy_part(run.engine, run.engine.quantizer, f"calibrated on {n} tokens of {run.data.name}")
            }
            run.add_row(row | {"attention": scored.attention, "memory": scored.memory, "warnings": scored.warnings})
        cells = []
        for n in self.tokens:
            parts = [scored.part for (m, _), scored in zip(trials, results, strict=True) if m == n]
            kl, ppl = ([part[key] for part in parts] for key in ("kl_divergence", "perplexity_delta_pct"))
            top = sum(part["top1_agreement"] for part in parts) / len(parts)
            row_cells = [f"{n:,}", number(sum(kl) / len(kl), 5), number(max(kl), 5), number(sum(ppl) / len(ppl), 2, suffix=" %")]
            cells.append([*row_cells, number(max(ppl), 2, suffix=" %"), number(100 * top, 1, suffix=" %")])
        judges = f"{self.repeats} repeats, on {sum(map(len, held)):,} tokens held back"
        title = f"{quantizer.name} scales from so many tokens of {run.data.name}; {judges}"
        show(title, ["tokens", "KL, mean", "KL, worst", "perplexity, mean", "perplexity, worst", "top-1"], cells)


def _prefix(documents: list[list[int]], tokens: int, seed: int) -> list[list[int]]:
    """The first `tokens` tokens of the documents, shuffled by `seed`; the last document is cut."""
    shuffled, out = random.Random(seed).sample(documents, len(documents)), []
    for document in shuffled:
        if tokens <= 0:
            break
        out.append(document[:tokens])
        tokens -= len(out[-1])
    return out
