"""Times the simulator, in simulated output tokens per second, and measures how much memory it takes.

Takes: a workload. Gives: one row with what was simulated and what that cost. Steps that are taken at once count one by one.
"""

import resource
import sys
import time
from dataclasses import dataclass

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import number, show
from experiments.measuring.rows import for_workload, serve_row


@EXPERIMENTS.register("bench_simulator")
@dataclass
class BenchSimulator(Experiment):
    """Has no settings of its own: it simulates the configured workload on the configured engine."""

    runners = ("simulated",)

    def run(self, run: Run) -> None:
        config, model = for_workload(run)
        start, cpu_start = time.perf_counter(), time.process_time()
        row = serve_row(run, model, config, "simulator")
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        steps = row["requests"]["output_tokens"]
        row["simulator"] = {
            "request_steps": steps,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "request_steps_per_s": steps / seconds,
            "request_steps_per_cpu_s": steps / cpu,
            "peak_resident_bytes": _peak_resident_bytes(),
        }
        run.add_row(row)
        served, found = row["requests"], row["simulator"]
        columns = ["requests", "tokens in", "out", "simulated s", "seconds", "CPU s", "request-steps/s", "per CPU s", "peak MiB"]
        cells = [
            number(served["served"]),
            number(served["prompt_tokens"] / served["served"], 0),
            number(served["output_tokens"] / served["served"], 0),
            number(served["seconds"], 0),
            number(seconds, 1),
            number(cpu, 1),
            number(found["request_steps_per_s"], 0),
            number(found["request_steps_per_cpu_s"], 0),
            number(found["peak_resident_bytes"] / 2**20, 0),
        ]
        show(f"Simulating {run.record.data['model']['name']} on {config.device.name}", columns, [cells])


def _peak_resident_bytes() -> int:
    """The most memory that this process has had since it started. psutil tells the peak on Windows only."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
