"""Times how long the scheduler takes to plan a step, by the number of running requests and the length of their contexts.

Takes: numbers of running requests and context lengths. Gives: rows with median and p99 milliseconds per step.
"""

from dataclasses import dataclass, field

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import number, show
from experiments.measuring.planning import planning_time
from qkv.validate import require


@EXPERIMENTS.register("bench_scheduler")
@dataclass
class BenchScheduler(Experiment):
    """batch_sizes: running requests. context_lengths: tokens per request when timing starts. steps: how many decodes are timed.

    shared_prefix_tokens: tokens that all prompts have in common.
    """

    runners = ("model", "simulated")

    batch_sizes: list[int] = field(default_factory=lambda: [256])
    context_lengths: list[int] = field(default_factory=lambda: [1024, 8192])
    steps: int = 200
    shared_prefix_tokens: int = 1024

    def __post_init__(self) -> None:
        require(bool(self.batch_sizes) and min(self.batch_sizes) >= 1, "batch_sizes", self.batch_sizes, "numbers of at least 1")
        lengths = self.context_lengths
        require(bool(lengths) and min(lengths) >= 2, "context_lengths", lengths, "numbers of at least 2")
        require(self.steps >= 1, "steps", self.steps, "at least 1")
        require(self.shared_prefix_tokens >= 0, "shared_prefix_tokens", self.shared_prefix_tokens, "at least 0")

    def run(self, run: Run) -> None:
        cases = [(batch, context) for batch in self.batch_sizes for context in self.context_lengths]
        table = []
        for batch, context in cases:
            row = run.add_row(planning_time(run.engine, batch, context, self.steps, self.shared_prefix_tokens))
            step = row["scheduler"]
            plan, complete = step["plan_ms"], step["complete_ms"]
            cells = (plan["mean"], plan["p50"], plan["p99"], complete["p50"], step["blocks_allocated_per_step"])
            table.append([f"{batch:,}", f"{context:,}", *(number(cell, 3) for cell in cells)])
        columns = ["running", "tokens each", "plan mean ms", "plan p50 ms", "plan p99 ms", "complete p50 ms", "new blocks/step"]
        show("Scheduling one decode step, no model", columns, table, "plan: before the forward; complete: after it")
