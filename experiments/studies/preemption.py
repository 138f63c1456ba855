"""Measures what preemption costs when victims are recomputed, swapped, or whichever is cheaper, by pool size and prompt length.

Takes: preemptors, pool sizes, prompt lengths. Gives: one row per combination, with waiting, recomputed tokens, swapped bytes and
goodput.
"""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from tqdm import tqdm

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import lines
from experiments.harness.table import number, show
from experiments.harness.workload import Slo
from experiments.measuring.rows import for_workload, serve_row, with_pool
from experiments.measuring.sizing import block_size_of, bytes_per_block
from qkv.models import dimensions
from qkv.policies.preemptor.base import PREEMPTORS
from qkv.validate import require


@EXPERIMENTS.register("preemption")
@dataclass
class Preemption(Experiment):
    """preemptors: names or {name: ..., field: value}. pools: sizes, as shares of what all requests in flight hold on average.

    prompt_tokens: mean prompt lengths. slo: the service level that a good request meets.
    """

    runners = ("model", "simulated")

    preemptors: list[Any] = field(default_factory=lambda: ["recompute", "swap", "auto"])
    pools: list[float] = field(default_factory=lambda: [0.4, 0.7])
    prompt_tokens: list[int] = field(default_factory=lambda: [200, 1500])
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        require(bool(self.preemptors), "preemptors", self.preemptors, "at least one")
        require(bool(self.pools) and min(self.pools) > 0, "pools", self.pools, "shares above 0")
        require(bool(self.prompt_tokens) and min(self.prompt_tokens) >= 1, "prompt_tokens", self.prompt_tokens, "at least 1")

    def check(self) -> None:
        for spec in self.preemptors:
            PREEMPTORS.build(spec)

    def run(self, run: Run) -> None:
        config, model = for_workload(run)
        size = block_size_of(config)
        block = bytes_per_block(dimensions(config.model), config.model.dtype, config.quantizer, size)
        cases = list(product(self.prompt_tokens, self.pools, self.preemptors))
        rows = []
        with tqdm(total=len(cases), disable=not run.progress, unit="case", leave=False) as bar:
            for prompt, share, spec in cases:
                work = replace(run.workload, prompt_tokens=prompt)
                mean = work.prefix_tokens + prompt + work.output_tokens
                tokens = max(int(share * work.concurrency * mean), (config.scheduler.max_model_len or 0) + size)
                named = {"name": spec} if isinstance(spec, str) else dict(spec)
                case = with_pool(replace(config, preemptor=named), (tokens // size + 1) * block)
                name = ", ".join(str(v) if k == "name" else f"{k}={v}" for k, v in named.items())
                row = serve_row(run, model, case, f"{name}; pool {share:.0%}; prompts {prompt:,}", work, self.slo)
                recompute = row["cache"]["recompute_tokens"]
                row["policy"] |= {"preemptor": name, "pool_share": share, "prompt_tokens": prompt}
                row["cache"]["recompute_tax"] = recompute / row["requests"]["prompt_tokens"]
                rows.append(run.add_row(row))
                bar.update()
        self._show(run, rows)

    def _show(self, run: Run, rows: list[dict[str, Any]]) -> None:
        columns = ["prompts", "pool", "preemptor", "preempted", "recompute tax", "swapped GiB", "TTFT p50", "p95", "p99"]
        columns += ["E2E p50", "p95", "p99", "tok/s", "good req/s"]
        cells = []
        for row in rows:
            policy, cache, speed = row["policy"], row["cache"], row["speed"]
            cells.append(
                [
                    f"{policy['prompt_tokens']:,}",
                    f"{policy['pool_share']:.0%}",
                    policy["preemptor"],
                    number(cache["preemptions"]),
                    number(100 * cache["recompute_tax"], 1, suffix=" %"),
                    number(cache["swap_bytes"] / 2**30, 1),
                    *(number(speed["ttft_s"][p], 2) for p in ("p50", "p95", "p99")),
                    *(number(speed["e2e_s"][p], 1) for p in ("p50", "p95", "p99")),
                    number(speed["output_tokens_per_s"], 0),
                    number(speed["goodput_requests_per_s"], 2),
                ]
            )
        slo = f"TTFT {self.slo.ttft} s, TPOT {self.slo.tpot} s"
        note = (
            f"recompute tax: tokens prefilled a second time / prompt tokens. good: within the service level ({slo}; None: any)."
        )
        show("Preemption", columns, cells, note, text=(0, 2))
        panels: dict[str, dict[str, list[tuple[float, float | None]]]] = {}
        for row in rows:
            policy = row["policy"]
            panel = panels.setdefault(f"E2E p95 s, prompts {policy['prompt_tokens']:,}", {})
            panel.setdefault(policy["preemptor"], []).append((100 * policy["pool_share"], row["speed"]["e2e_s"]["p95"]))
        lines(run.folder / "preemption.png", panels, "Preemption", "pool, % of the mean demand")
