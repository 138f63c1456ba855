"""Describes a workload: percentiles of its lengths, and how much of its prompts a prefix cache could find.

Takes: a workload. Gives: one row, a table, advice. Runs no model and no engine, so answers are unknown, and conversations count
with their first turns only.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import console, number, show
from experiments.harness.workload import Arrival, Traffic
from qkv.cache.prefix import PrefixHasher
from qkv.validate import require

WORTH = 0.2  # prefix caching pays where at least this share of the prompt tokens is repeated
_MOST = 0.75  # of what the smallest blocks find is found by the block size that is advised, the largest that does
BLOCK_SIZES = (4, 8, 16, 32, 64, 128, 256)  # that an allocator takes
_VOCAB = 32_000
_PERCENTILES = (1, 50, 90, 99)


@EXPERIMENTS.register("workload_stats")
@dataclass
class WorkloadStats(Experiment):
    """requests: the most that are looked at. block_size: so many tokens are shared together or not at all."""

    runners = ("model", "simulated")

    requests: int = 20_000
    block_size: int = 16

    def __post_init__(self) -> None:
        require(self.requests >= 1, "requests", self.requests, "at least 1")
        require(self.block_size >= 1, "block_size", self.block_size, "at least 1")

    def run(self, run: Run) -> None:
        found = stats(list(islice(Traffic(run.workload, run.engine.seed, _VOCAB), self.requests)), self.block_size)
        run.add_row({"label": "workload", "policy": {}, "workload": found})
        columns = ["tokens", "mean", *(f"p{p}" for p in _PERCENTILES), "largest"]
        show(f"{found['requests']:,} requests", columns, [_cells(name, found[name]) for name in ("prompt", "output", "total")])
        rate = found["prefix_duplication"]
        console().print(
            f"{100 * rate:.1f} % of the prompt tokens repeat what an earlier prompt began with, in blocks of {self.block_size}."
        )
        console().print(found["advice"])


def stats(requests: list[Arrival], block_size: int) -> dict[str, Any]:
    """Lengths, the share of prompt tokens that a prefix cache of unlimited size would find, and advice."""
    prompts, outputs = np.array([len(r.prompt) for r in requests]), np.array([r.output_tokens for r in requests])
    lengths = {"prompt": _lengths(prompts), "output": _lengths(outputs), "total": _lengths(prompts + outputs)}
    rate = repeated_share(requests, block_size)
    return {"requests": len(requests), **lengths, "prefix_duplication": rate, "advice": _advice(requests, block_size, rate)}


def repeated_share(requests: list[Arrival], block_size: int) -> float:
    """The share of prompt tokens that a prefix cache of unlimited size with blocks of this size would find."""
    hasher, seen, repeated = PrefixHasher("xxh3_128", block_size, ["stats"]), set[bytes](), 0
    for request in requests:
        chain: list[bytes] = []
        hasher.extend(chain, request.prompt, len(request.prompt) // block_size)
        repeated += block_size * sum(block in seen for block in chain)
        seen.update(chain)
    return repeated / sum(len(request.prompt) for request in requests)


def _advice(requests: list[Arrival], block_size: int, rate: float) -> str:
    """Whether a prefix cache pays with blocks of this size; if not, whether it would with smaller ones, since only whole blocks
    are shared."""
    if rate >= WORTH:
        return "Prefix caching pays."
    smaller = {size: repeated_share(requests, size) for size in reversed(BLOCK_SIZES) if size < block_size}
    enough = [size for size, share in smaller.items() if share >= max(WORTH, _MOST * max(smaller.values()))]
    if enough:
        return (
            f"Only whole blocks are shared, and what these prompts share is too short for blocks of {block_size}: in blocks of "
            f"{enough[0]} it is {smaller[enough[0]]:.1%}, and prefix caching pays (allocator.block_size={enough[0]})."
        )
    return (
        f"Below {WORTH:.0%} in blocks of {block_size} and of every smaller size: leave prefix caching off "
        "(cache.enable_prefix_caching=false)."
    )


def _lengths(values: Any) -> dict[str, float]:
    points = np.percentile(values, _PERCENTILES)
    shares = {f"p{p}": float(v) for p, v in zip(_PERCENTILES, points, strict=True)}
    return {"mean": float(values.mean()), **shares, "largest": float(values.max())}


def _cells(name: str, values: dict[str, float]) -> list[str]:
    return [name, *(number(value, 1 if key == "mean" else 0) for key, value in values.items())]
