"""The arithmetic before any run: what fits a card, and what would make the others fit.

Takes: a model's dimensions, a memory size, a demand. Gives: bytes per token, blocks, requests, options; one row, two tables.
Needs no weights. Does not know about: time.
"""

from dataclasses import dataclass, field
from typing import Any

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import console, number, show
from experiments.measuring.sizing import GIB, Demand, plan_row
from qkv.config import EngineConfig
from qkv.models import Dimensions, dimensions


@EXPERIMENTS.register("plan")
@dataclass
class Plan(Experiment):
    """plan: what is to be served, and on how much memory."""

    runners = ("model", "simulated")

    plan: Demand = field(default_factory=Demand)

    def run(self, run: Run) -> None:
        dims = dimensions(run.engine.model)
        run.record.set(
            "model",
            {"name": dims.name, "source": dims.source, "layers": dims.layers, "kv_heads": dims.kv_heads}
            | {"query_heads": dims.query_heads, "head_dim": dims.head_dim, "dtype": run.engine.model.dtype}
            | ({"parameters": dims.parameters} if dims.parameters else {}),
        )
        row = run.add_row(plan_row(run.engine, dims, self.plan))
        _show(row, dims, self.plan, run.engine)


def _show(row: dict[str, Any], dims: Dimensions, demand: Demand, config: EngineConfig) -> None:
    plan = row["plan"]
    shape = f"{dims.layers} layers x {dims.kv_heads} KV heads x {dims.head_dim}"
    what = f"{dims.name}: {shape}, {config.model.dtype}, KV quantizer {config.quantizer['name']}"
    weights = plan.get("weight_bytes")
    lines = [
        ["KV bytes per token", number(plan["kv_bytes_per_token"], 0), ""],
        [
            f"block of {row['policy']['block_size']} tokens",
            f"{plan['block_bytes']:,}",
            "bytes; one null block more is always needed",
        ],
        ["weights", number(weights and weights / GIB, 1), "GiB" if weights else "parameters are not known"],
        [
            "left for the cache",
            number(plan["kv_budget_bytes"] / GIB, 1),
            f"GiB of {plan['device_memory'] / GIB:.1f}, {plan['reserve_bytes'] / GIB:.1f} reserved",
        ],
        ["blocks", number(plan["blocks"]), f"{plan['tokens']:,} tokens"],
        [
            "requests that fit",
            number(plan["requests"]),
            f"of {plan['tokens_per_request']:,} tokens in whole blocks ({plan['requests_upper']:,} ignoring rounding)",
        ],
        [
            "asked for",
            f"{plan['kv_bytes'] / GIB:,.2f}",
            f"GiB for {demand.concurrency:,} requests x {demand.context:,} tokens: {'fits' if plan['fits'] else 'DOES NOT FIT'}",
        ],
    ]
    show(what, ["", "", ""], lines, text=(0, 2))
    cells = [
        [
            o["change"],
            number(o["kv_bytes_per_token"], 0),
            number(o["kv_bytes"] / GIB, 2),
            "yes" if o["fits"] else "no",
            number(o["max_concurrency"]),
            number(o["max_context"]),
        ]
        for o in plan["options"]
    ]
    show("Options", ["change", "KV B/token", "GiB", "fits", "requests at this context", "tokens at this concurrency"], cells)
    if not plan["fits"] and not any(o["fits"] for o in plan["options"]):
        console().print("Nothing alone makes it fit: combine a quantizer with a shorter context or fewer requests.")
