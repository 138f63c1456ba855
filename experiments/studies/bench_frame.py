"""Times all that a forward does besides attention, which returns zeros at once here: in the fused frame and in transformers.

Takes: numbers of packed tokens. Gives: a row per number and kind of forward. Does not know about: the cache, sampling.
"""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import number, show
from qkv.attention.base import StepContext
from qkv.attention.hf import HFAdapter
from qkv.layout import LayerShape
from qkv.models import load_model
from qkv.validate import require


class _Nothing(StepContext):
    """Attention that returns zeros at once."""

    def __init__(self, layers: list[LayerShape]) -> None:
        self.layers, self.calls = layers, 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any = None) -> torch.Tensor:
        self.calls += 1
        return q.new_zeros(q.shape[0], self.layers[layer].Hq, self.layers[layer].Dv)


@EXPERIMENTS.register("bench_frame")
@dataclass
class BenchFrame(Experiment):
    """tokens: packed rows per forward. Up to 64 rows are taken for decodes and all get logits; of more, a prefill, only one does.

    repeats: how many forwards of each kind; the kinds take turns.
    """

    tokens: list[int] = field(default_factory=lambda: [1, 16])
    repeats: int = 20

    def __post_init__(self) -> None:
        require(bool(self.tokens) and min(self.tokens) >= 1, "tokens", self.tokens, "numbers of at least 1")
        require(self.repeats >= 1, "repeats", self.repeats, "at least 1")

    def run(self, run: Run) -> None:
        loaded = load_model(run.engine.model)
        fused, plain = HFAdapter(loaded.model), HFAdapter(loaded.model, fused=False)
        adapters = {"transformers": plain} if fused.forward_path != "fused" else {"fused": fused, "transformers": plain}
        table = []
        with tqdm(total=len(self.tokens) * self.repeats, disable=not run.progress, unit="round", leave=False) as bar:
            for T in self.tokens:
                wall: dict[str, list[float]] = {name: [] for name in adapters}
                busy: dict[str, list[float]] = {name: [] for name in adapters}
                for i in range(self.repeats + 1):
                    for name, adapter in adapters.items():
                        seconds = _time(adapter, T)
                        if i:  # the first round warms up
                            wall[name].append(1e3 * seconds[0])
                            busy[name].append(1e3 * seconds[1])
                    bar.update(i > 0)
                for name in adapters:
                    times = statistics.median(wall[name]), min(wall[name]), statistics.median(busy[name])
                    part = {
                        "tokens": T,
                        "forward": name,
                        "wall_ms": times[0],
                        "wall_ms_min": times[1],
                        "cpu_ms": times[2],
                        "threads": torch.get_num_threads(),
                    }
                    run.add_row({"label": f"{name}, {T}", "frame": part})
                    table.append([f"{T:,}", name, *(number(x, 2) for x in times)])
        for adapter in (fused, plain):
            adapter.close()
        note = f"{torch.get_num_threads()} threads; medians of {self.repeats} each, in turn; CPU: of all threads together"
        if "fused" not in adapters:
            note += f"\n{fused.forward_path}"
        columns = ["packed tokens", "forward", "ms", "fastest ms", "CPU ms"]
        show(f"{loaded.name}, {loaded.model.dtype}, without attention".replace("torch.", ""), columns, table, note)


def _time(adapter: HFAdapter, T: int) -> tuple[float, float]:
    """Wall and CPU seconds of one forward."""
    ids = torch.arange(T) * 7919 % adapter.vocab_size
    index = torch.arange(T) if T <= 64 else torch.tensor([T - 1])
    context = _Nothing(adapter.layers)
    wall, busy = time.perf_counter(), time.process_time()
    adapter.forward(ids, torch.arange(T), index, context)
    return time.perf_counter() - wall, time.process_time() - busy
