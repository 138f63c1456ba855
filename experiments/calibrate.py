"""Static scales from the user's own data: a scale file, its statistics, a report, and a check on documents held back.

Takes: the settings of a run. Gives: files and one row. The parts are in calibration/; this puts them in order.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from calibration import search
from calibration.collect import quantizer_metadata
from calibration.gather import gather
from calibration.sample import Sample, Sampling, draw
from calibration.statistics import Statistics, statistics_path
from experiments import measure
from experiments.base import EXPERIMENTS, Experiment, Run
from experiments.table import console
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import load_model
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile
from qkv.validate import require


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
        quantizer = QUANTIZERS.build(run.engine.quantizer)
        if not quantizer.observers():
            able = [name for name in QUANTIZERS.names() if QUANTIZERS.build(name).observers()]
            raise ConfigError(f"quantizer {quantizer.name} has no static scales to calibrate; those that have: {', '.join(able)}")
        loaded = load_model(run.engine.model)
        sample = draw(run.data, loaded.tokenizer, self.sample, run.engine.seed)
        console().print(f"data {run.data.name}: {sample.report.line()}\n{sample.how}")
        config = whole_documents(run.engine, self.sample.tokens)
        engine = measure.engine(config, loaded, "none")
        try:
            run.record.set("model", measure.model_part(loaded, engine))
            statistics, scales = self._calibrate(run, engine, quantizer, sample)
        finally:
            engine.close()
        statistics.save(statistics_path(self.out))
        scales.save(self.out)
        self._checkpoint.unlink(missing_ok=True)

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
            if self.method == "output":
                bar.set_description("searching ranges")
                choices = search.least_output_error(quantizer, statistics.layers, engine, searched, bar.update)
                tensors = search.at(quantizer, statistics.layers, choices, cover=False)
            else:
                tensors = search.tensors(quantizer, statistics.layers, engine.layers, self.method, self.percentile)
        method: dict[str, Any] = {"percentile": self.percentile} if self.method == "percentile" else {}
        statistics.metadata |= {"data": run.data.name}
        metadata = (
            statistics.metadata
            | quantizer_metadata(quantizer, self.method)
            | method
            | {
                "sampling": sample.how,
                "coverage": {"layers": len(statistics.layers), "of": len(engine.layers)},
            }
        )
        file = ScaleFile(tensors, metadata)
        file.validate(engine.layers, quantizer.name, engine.loaded.fingerprint)
        return statistics, file


def whole_documents(config: EngineConfig, tokens: int) -> EngineConfig:
    """An engine that runs a document of up to `tokens` tokens in one step, one at a time."""
    from dataclasses import replace

    config = measure.single_document(config, tokens)
    batch = max(tokens, config.scheduler.max_num_batched_tokens)
    return replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=batch))
