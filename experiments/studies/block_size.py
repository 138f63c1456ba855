"""Measures what a block size costs and saves (waste, table entries, planning time, hits, tokens/s), and says which to take.

Takes: sizes, a workload. Gives: one row per size and a recommendation for the lengths of this workload.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import lines
from experiments.harness.table import console, number, show
from experiments.measuring.planning import planning_time
from experiments.measuring.rows import for_workload, serve_row, with_pool
from experiments.measuring.sizing import bytes_per_block
from qkv.models import dimensions
from qkv.policies.allocator.base import ALLOCATORS
from qkv.validate import require

_TABLE_TOKENS = 2048


@EXPERIMENTS.register("block_size")
@dataclass
class BlockSize(Experiment):
    """sizes: tokens per block. pool_tokens: size of the pool, which is the same for all block sizes. max_waste: share of the pool
    that may be lost to partly empty last blocks and to prefix tokens after the last whole block; the largest block size that
    loses no more is recommended."""

    runners = ("model", "simulated")

    sizes: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64, 128])
    pool_tokens: int = 32768
    max_waste: float = 0.04

    def __post_init__(self) -> None:
        require(bool(self.sizes), "sizes", self.sizes, "at least one size")
        require(0 < self.max_waste < 1, "max_waste", self.max_waste, "above 0 and below 1")
        require(self.pool_tokens >= 2 * max(self.sizes, default=0), "pool_tokens", self.pool_tokens, "at least two blocks")

    def check(self) -> None:
        for size in self.sizes:
            ALLOCATORS.build({"name": "paged", "block_size": size})

    def run(self, run: Run) -> None:
        config, model = for_workload(run)
        dims, work = dimensions(config.model), run.workload
        length = work.prefix_tokens + work.prompt_tokens + work.output_tokens
        rows, planning = [], {}
        for size in self.sizes:
            block = bytes_per_block(dims, config.model.dtype, config.quantizer, size)
            sized = with_pool(
                replace(config, allocator={"name": "paged", "block_size": size}), (self.pool_tokens // size + 1) * block
            )
            row = serve_row(run, model, sized, f"{size} tokens")
            row["blocks"] = {
                "waste_at_end": row["memory"].get("fragmentation_at_end"),
                "waste_expected": size / 2 / length,
                "table_entries": -(-_TABLE_TOKENS // size),
                "prefix_tokens_shared": work.prefix_tokens // size * size,
            }
            rows.append(run.add_row(row))
            timed = planning_time(sized, batch=64, context=1024, steps=100, shared_prefix=0)
            planning[size] = timed["scheduler"]["plan_ms"]["p50"]  # type: ignore[index]
        (run.folder / "planning_ms.json").write_text(json.dumps(planning, indent=2) + "\n", encoding="utf-8")
        self._show(run, rows, planning, length)

    def _show(self, run: Run, rows: list[dict[str, Any]], planning: dict[int, float], length: int) -> None:
        columns = ["block size", "waste at end", "half a block", f"entries at {_TABLE_TOKENS:,}", "plan p50 ms", "prefix shared"]
        columns += ["hit rate", "utilization", "tok/s", "TTFT p50 s"]
        cells = []
        for size, row in zip(self.sizes, rows, strict=True):
            b, hits = row["blocks"], row["cache"].get("hit_rate")
            cells.append(
                [
                    row["label"],
                    number(b["waste_at_end"] and 100 * b["waste_at_end"], 2, suffix=" %"),
                    number(100 * b["waste_expected"], 2, suffix=" %"),
                    number(b["table_entries"]),
                    number(planning[size], 3),
                    f"{b['prefix_tokens_shared']} of {run.workload.prefix_tokens}",
                    number(hits and 100 * hits, 1, suffix=" %"),
                    number(100 * row["memory"]["utilization_mean"], 1, suffix=" %"),
                    number(row["speed"]["output_tokens_per_s"], 1),
                    number(row["speed"]["ttft_s"]["p50"], 3),
                ]
            )
        note = f"waste at end: empty part of the blocks that ending requests hold, {length:,} tokens each on average."
        show("Tokens per block", columns, cells, note)
        chosen = self.recommended(rows, run.workload.prefix_tokens, length)
        run.record.set("recommended_block_size", chosen)
        console().print(
            f"Recommended for these lengths: allocator.block_size={chosen}, the largest whose empty last blocks and unshared "
            f"prefix ends stay within {self.max_waste:.0%} of a request."
        )
        points = {
            "waste at end, %": {
                "measured": [(s, 100 * r["blocks"]["waste_at_end"]) for s, r in zip(self.sizes, rows, strict=True)]
            }
        }
        points["waste at end, %"]["half a block"] = [(s, 50 * s / length) for s in self.sizes]
        points["output tokens/s"] = {"": [(s, r["speed"]["output_tokens_per_s"]) for s, r in zip(self.sizes, rows, strict=True)]}
        lines(run.folder / "block_size.png", points, "Tokens per block", "block size", log_x=True, mark=chosen)

    def recommended(self, rows: list[dict[str, Any]], prefix: int, length: int) -> int:
        """The largest size that wastes no more than max_waste; the smallest size if all waste more."""
        costs = {}
        for size, row in zip(self.sizes, rows, strict=True):
            unshared = (prefix - row["blocks"]["prefix_tokens_shared"]) / length
            costs[size] = (row["blocks"]["waste_at_end"] or 0.0) + unshared
        return max((s for s, cost in costs.items() if cost <= self.max_waste), default=min(self.sizes))
