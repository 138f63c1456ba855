"""How far the simulator is from this machine: fit its device on a few real steps, then predict a workload and run it.

Takes: a model, a workload. Gives: fitted constants in the record, and one row for real and one simulated, with the errors.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from experiments import measure
from experiments.base import EXPERIMENTS, Experiment, Run
from experiments.load import open_engine, serve_row, with_length
from experiments.table import console, number, show
from qkv.config import DeviceConfig, EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import LoadedModel, dimensions, load_model
from qkv.simulation import SimulatedModel
from qkv.simulation.cost import StepCost
from qkv.types import SamplingParams, StepPlan
from qkv.validate import require

_ROUNDS = 12  # of choosing the slower side of each maximum and solving again
_REPORTED = {
    "output tokens/s": ("output_tokens_per_s", None),
    "TTFT mean, s": ("ttft_s", "mean"),
    "TPOT mean, s": ("tpot_s", "mean"),
}


@dataclass(frozen=True)
class Step:
    """What one real step did, and its seconds."""

    decodes: int
    keys: int
    chunks: tuple[tuple[int, int], ...]
    rows: int
    seconds: float


@EXPERIMENTS.register("validate")
@dataclass
class Validate(Experiment):
    """steps: decode steps per point of the fit. batches, contexts: its grid, requests at once and tokens each.

    write: a file to write the fitted device to, as a YAML for conf/device.
    """

    steps: int = 6
    batches: list[int] | None = None
    contexts: list[int] | None = None
    write: str | None = None

    def __post_init__(self) -> None:
        require(self.steps >= 2, "steps", self.steps, "at least 2")

    def run(self, run: Run) -> None:
        if run.engine.runner.name == "simulated":
            raise ConfigError("experiment=validate compares the simulator with a real run: use runner=default")
        config = with_length(run.engine, run.engine.scheduler.max_model_len or run.workload.max_tokens)
        loaded = load_model(config.model)
        steps = self._real_steps(run, loaded, config)
        device = fit(config, loaded, steps, _read_bandwidth())
        dims = dimensions(config.model)
        run.record.set(
            "device", {**vars(device), "steps_fitted": len(steps), "median_step_error": _error(config, dims, device, steps)}
        )
        real = run.add_row(serve_row(run, loaded, config, "real"))
        runner = replace(config.runner, name="simulated")
        model = SimulatedModel.of(config.model)
        predicted = serve_row(run, model, replace(config, runner=runner, device=device), "simulated")
        predicted["prediction_error"] = {
            name: _value(predicted, *keys) / _value(real, *keys) - 1 for name, keys in _REPORTED.items()
        }
        run.add_row(predicted)
        errors = predicted["prediction_error"]
        cells = [
            [name, number(_value(real, *keys), 3), number(_value(predicted, *keys), 3), number(100 * errors[name], 1, True, " %")]
            for name, keys in _REPORTED.items()
        ]
        show(f"{loaded.name} on this machine and in the simulator", ["", "real", "simulated", "error"], cells)
        text = _yaml(device, config)
        console().print(text)
        if self.write is not None:
            with open(self.write, "w", encoding="utf-8") as file:
                file.write(text)

    def _real_steps(self, run: Run, loaded: LoadedModel, config: EngineConfig) -> list[Step]:
        """Timed steps: prefills of several lengths, then decodes, for every batch and context."""
        budget = config.scheduler
        batches = self.batches or sorted({1, 4, 16, min(48, budget.max_num_seqs)})
        contexts = self.contexts or [32, 256, 1024]
        engine, _ = open_engine(run, loaded, config)
        steps: list[Step] = []

        def watch(plan: StepPlan, seconds: float) -> None:
            keys = sum(r.num_computed + 1 for r in plan.decodes)
            chunks = tuple((c.start, c.end) for c in plan.prefills)
            steps.append(
                Step(len(plan.decodes), keys, chunks, len(plan.decodes) + sum(c.completes for c in plan.prefills), seconds)
            )

        try:
            measure.generate(engine, [[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
            engine.watch_steps(watch)
            for batch in batches:
                for context in contexts:
                    if batch * (context + self.steps) < engine.intake.pool_tokens:
                        _one(engine, batch, context, self.steps)
        finally:
            engine.close()
        return steps


def _one(engine: Engine, batch: int, context: int, steps: int) -> None:
    engine.reset_prefix_cache()
    vocab = engine.intake.vocab_size
    prompts = [[(7919 * i + 31 * j + context) % vocab for j in range(context)] for i in range(batch)]
    measure.generate(engine, prompts, SamplingParams(max_tokens=steps + 1, ignore_eos=True))


def fit(config: EngineConfig, loaded: LoadedModel, steps: list[Step], bandwidth: float) -> DeviceConfig:
    """The device whose step costs are nearest, in relative error. bandwidth: at which this machine reads memory, bytes/s.

    The cost is linear in 1/flops, 1/attention_flops, 1/kv_bandwidth and the overhead once it is known which side of each
    maximum is the slower one; so: guess, solve, look again.
    """
    dims, itemsize = dimensions(config.model), getattr(torch, config.model.dtype).itemsize
    per_token = 2 * dims.kv_heads * dims.head_dim * dims.layers * itemsize
    device = replace(config.device, name="cpu", bandwidth=bandwidth)
    for _ in range(_ROUNDS):
        cost = StepCost.of(device, dims, itemsize, per_token)
        rows, targets = [], []
        for step in steps:
            tokens = step.decodes + sum(b - a for a, b in step.chunks)
            work = 2.0 * (cost.body * tokens + cost.head * step.rows)
            bound_by_work = work / device.flops > cost.weight_bytes / bandwidth
            pairs = sum((b - a) * a + (b - a) * (b - a + 1) // 2 for a, b in step.chunks) * float(cost.pair_operations)
            rows.append([1.0, work if bound_by_work else 0.0, step.keys * float(per_token), pairs])
            targets.append(step.seconds - (0.0 if bound_by_work else cost.weight_bytes / bandwidth))
        weights = 1 / np.array([s.seconds for s in steps])
        matrix = np.array(rows) * weights[:, None]
        scale = np.maximum(np.abs(matrix).max(0), 1e-30)
        found = np.linalg.lstsq(matrix / scale, np.array(targets) * weights, rcond=None)[0] / scale
        overhead, per_operation, per_byte, per_pair = (max(float(v), 1e-18) for v in found)
        device = replace(
            device,
            overhead_s=overhead,
            flops=min(1 / per_operation, 1e17),
            kv_bandwidth=min(1 / per_byte, 1e15),
            attention_flops=min(1 / per_pair, 1e17),
        )
    return device


def _error(config: EngineConfig, dims: Any, device: DeviceConfig, steps: list[Step]) -> float:
    """Median relative error of the fitted steps."""
    itemsize = getattr(torch, config.model.dtype).itemsize
    cost = StepCost.of(device, dims, itemsize, 2 * dims.kv_heads * dims.head_dim * dims.layers * itemsize)
    return float(np.median([abs(cost.seconds(s.decodes, s.keys, s.chunks, s.rows) / s.seconds - 1) for s in steps]))


def _read_bandwidth() -> float:
    """Bytes/s at which this machine sums a tensor that no cache holds."""
    import time

    data = torch.ones(64 * 2**20)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.numel() * data.element_size() / (time.perf_counter() - start))
    return best


def _value(row: dict[str, Any], key: str, part: str | None) -> float:
    value = row["speed"][key]
    return float(value if part is None else value[part])


def _yaml(device: DeviceConfig, config: EngineConfig) -> str:
    values = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in vars(device).items()}
    head = "# python -m experiments.run experiment=validate device=cpu\n"
    what = f"# A CPU, fitted on {config.model.name} ({config.model.dtype}) by the command above.\n"
    return head + what + OmegaConf.to_yaml(OmegaConf.create(values))
