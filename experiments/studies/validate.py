"""How far is the simulator from this machine? Fits its device to a few real steps, then predicts a workload and runs it.

Takes: a model, a workload. Gives: the fitted constants in the record, a real and a simulated row, and the errors between them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import console, number, show
from experiments.measuring import engines
from experiments.measuring.rows import for_workload, open_engine, serve_row
from qkv.config import DeviceConfig, EngineConfig
from qkv.engine import Engine
from qkv.models import Dimensions, LoadedModel, dimensions
from qkv.simulation import SimulatedModel
from qkv.simulation.cost import StepCost
from qkv.types import SamplingParams, StepPlan
from qkv.validate import require

_ROUNDS = 12  # so often the fit decides which term of each pair is longer, and solves again
_OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)  # the values of `overlap` that the fit tries
_REPORTED = {
    "output tokens/s": ("output_tokens_per_s", None),
    "TTFT mean, s": ("ttft_s", "mean"),
    "TPOT mean, s": ("tpot_s", "mean"),
}


@dataclass(frozen=True)
class Step:
    """What one real step did, in the terms of StepCost.seconds, and how long it took."""

    decodes: int
    keys: int
    chunks: tuple[tuple[int, int], ...]
    rows: int
    seconds: float

    @property
    def kind(self) -> str:
        return "decode" if not self.chunks else "mixed" if self.decodes else "prefill"


@EXPERIMENTS.register("validate")
@dataclass
class Validate(Experiment):
    """batches, contexts: the grid of the fit, in requests at once and tokens each. steps: how many decode steps are timed at each
    point of it.

    write: a file to write the fitted device to, as a YAML for conf/device.
    """

    steps: int = 6
    batches: list[int] | None = None
    contexts: list[int] | None = None
    write: str | None = None

    def __post_init__(self) -> None:
        require(self.steps >= 3, "steps", self.steps, "at least 3")

    def run(self, run: Run) -> None:
        config, loaded = for_workload(run)
        assert isinstance(loaded, LoadedModel)  # this experiment cannot be simulated
        steps = self._real_steps(run, loaded, config)
        device = fit(config, steps, _read_bandwidth())
        dims = dimensions(config.model)
        run.record.set(
            "device", {**vars(device), "steps_fitted": len(steps), "median_step_error": _errors(config, dims, device, steps)}
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
        left = run.record.data["device"]["median_step_error"]
        note = f"median step error of the fit: {', '.join(f'{kind} {100 * error:.1f} %' for kind, error in left.items())}"
        show(f"{loaded.name} on this machine and in the simulator", ["", "real", "simulated", "error"], cells, note)
        text = _yaml(device, config)
        console().print(text)
        if self.write is not None:
            with open(self.write, "w", encoding="utf-8") as file:
                file.write(text)

    def _real_steps(self, run: Run, loaded: LoadedModel, config: EngineConfig) -> list[Step]:
        """Time real steps: for every batch and context, prefills of several lengths, then decodes; and steps that do both."""
        budget = config.scheduler
        batches = self.batches or sorted({1, 4, 16, min(48, budget.max_num_seqs)})
        contexts = self.contexts or [32, 256, 1024]
        fitting = [(b, c) for b in batches for c in contexts]
        engine, _ = open_engine(run, loaded, config)
        fitting = [(b, c) for b, c in fitting if b * (c + self.steps * len(contexts)) + sum(contexts) < engine.intake.pool_tokens]
        steps: list[Step] = []
        try:
            engines.generate(engine, [[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
            for batch, context in tqdm(fitting, disable=not run.progress, unit="point", leave=False):
                steps += _timed(engine, batch, context, self.steps, joining=contexts)
        finally:
            engine.close()
        return steps


def _timed(engine: Engine, batch: int, context: int, steps: int, joining: list[int]) -> list[Step]:
    """The steps in which `batch` prompts of `context` tokens are read and continued. While they decode, prompts of the lengths
    `joining` come, one at a time.

    A step's seconds count from the end of the step before, so that they include planning and bookkeeping; the first step's are
    those of its forward alone.
    """
    engine.reset_prefix_cache()
    vocab, found, last = engine.intake.vocab_size, list[Step](), None

    def watch(plan: StepPlan, seconds: float) -> None:
        nonlocal last
        now, keys = engine.clock(), sum(r.num_computed + 1 for r in plan.decodes)
        chunks = tuple((c.start, c.end) for c in plan.prefills)
        rows = len(plan.decodes) + sum(c.completes for c in plan.prefills)
        found.append(Step(len(plan.decodes), keys, chunks, rows, seconds if last is None else now - last))
        last = now

    def send(salt: int, length: int, new: int) -> None:
        prompt = [(7919 * salt + 31 * j + length) % vocab for j in range(length)]
        engine.add_request(prompt, SamplingParams(max_tokens=new, ignore_eos=True))

    engine.watch_steps(watch)
    try:
        for i in range(batch):
            send(i, context, 1 + steps * len(joining))
        for i, length in enumerate(joining):
            while engine.scheduler.num_waiting or not engine.intake.empty or engine.scheduler.decoding == []:
                engine.advance()
            for _ in range(steps - 2):
                engine.advance()
            send(batch + i, length, 2)
        while engine.has_work:
            engine.advance()
    finally:
        engine.watch_steps(None)
    return found


def fit(config: EngineConfig, steps: list[Step], bandwidth: float) -> DeviceConfig:
    """The device whose step costs come nearest to the measured steps, by the median relative errors of decodes, of prefills and
    of steps that do both.

    bandwidth: bytes/s at which this machine reads memory."""
    dims = dimensions(config.model)
    fits = [_fit(config, dims, steps, bandwidth, overlap) for overlap in _OVERLAPS]
    return min(fits, key=lambda device: sum(_errors(config, dims, device, steps).values()))


def _fit(config: EngineConfig, dims: Dimensions, steps: list[Step], bandwidth: float, overlap: float) -> DeviceConfig:
    """The best device for one `overlap`. Once it is known which term of each pair in StepCost is the longer one, the cost is
    linear in 1/flops, 1/attention_flops, 1/kv_bandwidth and the overhead. So the fit guesses, solves, looks which terms are
    longer then, and solves again. All kinds of steps have equal weight. Steps that are left with a large relative error weigh
    less the next time, so that a few disturbed steps do not matter."""
    from scipy.optimize import nnls  # here: it takes long to import, and every command imports every study

    device = replace(config.device, name="cpu", bandwidth=bandwidth, overlap=overlap)
    counts = Counter(step.kind for step in steps)
    share = np.array([counts[step.kind] ** -0.5 for step in steps])
    trust = np.ones(len(steps))
    measured = np.array([s.seconds for s in steps])
    for _ in range(_ROUNDS):
        cost = _cost(config, dims, device)
        terms = np.array([_terms(cost, step) for step in steps])
        targets = measured - terms[:, 0]
        weights = share * trust / measured
        matrix = terms[:, 1:] * weights[:, None]
        scale = np.maximum(np.abs(matrix).max(0), 1e-30)
        found = nnls(matrix / scale, targets * weights)[0] / scale
        overhead, per_operation, per_byte, per_pair = (float(v) for v in found)
        device = replace(
            device,
            overhead_s=overhead,
            flops=1 / max(per_operation, 1e-18),
            kv_bandwidth=1 / max(per_byte, 1e-18),
            attention_flops=1 / max(per_pair, 1e-18),
        )
        left = np.abs(matrix @ found - targets * weights) / (share * trust)
        trust = 1 / np.sqrt(np.maximum(left, 0.02))
    return device


def _terms(cost: StepCost, step: Step) -> list[float]:
    """The step's cost as a sum: [known seconds, and the factors of overhead, 1/flops, 1/kv_bandwidth and 1/attention_flops]."""
    device = cost.device
    tokens = step.decodes + sum(b - a for a, b in step.chunks)
    known, work = cost.weight_bytes / device.bandwidth, 2.0 * (cost.body * tokens + cost.head * step.rows)
    hidden = 1 - device.overlap
    longer = work / device.flops > known
    terms = [known * (hidden if longer else 1.0), 1.0, work * (1.0 if longer else hidden), 0.0, 0.0]
    pairs = sum((b - a) * a + (b - a) * (b - a + 1) // 2 for a, b in step.chunks)
    for keys, n in ((step.keys, step.keys), (sum(b for _, b in step.chunks), pairs)):
        num_bytes, operations = keys * cost.kv_bytes_per_token, n * float(cost.pair_operations)
        longer = operations / device.attention_flops > num_bytes / device.kv_bandwidth
        terms[3] += num_bytes * (hidden if longer else 1.0)
        terms[4] += operations * (1.0 if longer else hidden)
    return terms


def _cost(config: EngineConfig, dims: Dimensions, device: DeviceConfig) -> StepCost:
    itemsize = getattr(torch, config.model.dtype).itemsize
    return StepCost.of(device, dims, itemsize, 2 * dims.kv_heads * dims.head_dim * dims.layers * itemsize)


def _errors(config: EngineConfig, dims: Dimensions, device: DeviceConfig, steps: list[Step]) -> dict[str, float]:
    """The median relative error of the steps, by kind of step."""
    cost, found = _cost(config, dims, device), dict[str, list[float]]()
    for step in steps:
        seconds = cost.seconds(step.decodes, step.keys, step.chunks, step.rows)
        found.setdefault(step.kind, []).append(abs(seconds / step.seconds - 1))
    return {kind: float(np.median(errors)) for kind, errors in sorted(found.items())}


def _read_bandwidth() -> float:
    """Bytes/s at which this machine sums a tensor that is too large for its caches."""
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
    lines = [f"{k}: {f'{v:.2e}' if isinstance(v, float) else v}" for k, v in vars(device).items()]
    head = "# python -m experiments.run experiment=validate device=cpu\n"
    how = f"{torch.get_num_threads()} threads, {config.runner.clock} time"
    what = f"# A CPU, fitted on {config.model.name} ({config.model.dtype}, {how}) by the command above.\n"
    return head + what + "\n".join(lines) + "\n"
