"""How many requests should run at once? Measures tokens/s, waiting and memory from one request to saturation.

Takes: a workload. Gives: one row per concurrency, a chart, and the knee of the curve with the reason why it is there.
"""

from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.plots import lines
from experiments.harness.table import console, number, show
from experiments.measuring.rows import for_workload, serve_row
from qkv.validate import require

_FULL = 0.95  # a peak use of the pool above this counts as exhausted


@EXPERIMENTS.register("concurrency")
@dataclass
class Concurrency(Experiment):
    """Keeps a level's number of requests in flight at any time, whatever arrivals the workload has; a trace only gives lengths.

    levels: how many requests at once; null: 1, 2, 4 and so on, until tokens/s grow by less than `gain`, and at most `most`.

    requests_per_level: at level n, n times as many requests are served. knee: the recommended level is the smallest that has this
    share of the best tokens/s.
    """

    runners = ("model", "simulated")

    levels: list[int] | None = None
    most: int = 512
    gain: float = 0.05
    requests_per_level: int = 16
    knee: float = 0.9

    def __post_init__(self) -> None:
        require(not self.levels or min(self.levels) >= 1, "levels", self.levels, "numbers of at least 1, or null")
        require(self.most >= 1, "most", self.most, "at least 1")
        require(self.requests_per_level >= 2, "requests_per_level", self.requests_per_level, "at least 2")
        require(0 < self.knee <= 1, "knee", self.knee, "above 0 and at most 1")
        require(0 <= self.gain < 1, "gain", self.gain, "at least 0 and below 1")

    def run(self, run: Run) -> None:
        (config, model), rows = for_workload(run), list[dict[str, Any]]()
        levels = self.levels or [2**i for i in range(self.most.bit_length()) if 2**i <= self.most]
        for level in tqdm(levels, disable=not run.progress, unit="level", leave=False):
            count = max(64, self.requests_per_level * level) if self.levels is None else self.requests_per_level * level
            work = replace(run.workload, arrivals="closed", concurrency=level, num_requests=min(count, run.workload.num_requests))
            if run.workload.arrivals == "trace":
                work = replace(work, lengths="file")
            row = serve_row(run, model, config, f"{level}", work)
            row["policy"]["concurrency"] = level
            rows.append(run.add_row(row))
            before = rows[-2]["speed"]["output_tokens_per_s"] if len(rows) > 1 else 0.0
            if self.levels is None and before and row["speed"]["output_tokens_per_s"] < (1 + self.gain) * before:
                break
        knee = find_knee(rows, self.knee, config.scheduler.max_num_seqs)
        run.record.set("knee", knee)
        self._show(run, rows, knee)

    def _show(self, run: Run, rows: list[dict[str, Any]], knee: dict[str, Any]) -> None:
        columns = ["at once", "tok/s", "TTFT p50 s", "p95", "TPOT p50 ms", "p95", "peak GiB", "utilization", "preempted", ""]
        cells = []
        for row in rows:
            speed, level = row["speed"], row["policy"]["concurrency"]
            ttft, tpot = speed.get("ttft_s", {}), speed.get("tpot_s", {})
            cells.append(
                [
                    f"{level:,}",
                    number(speed["output_tokens_per_s"], 1),
                    number(ttft.get("p50"), 3),
                    number(ttft.get("p95"), 3),
                    *(number(tpot.get(p) and 1e3 * tpot[p], 1) for p in ("p50", "p95")),
                    number(row["memory"]["peak_bytes"] / 2**30, 2),
                    number(100 * row["memory"]["utilization_mean"], 1, suffix=" %"),
                    number(row["cache"]["preemptions"]),
                    "<- knee" if level == knee["concurrency"] else "",
                ]
            )
        show(f"{run.record.data['model']['name']}: requests at once", columns, cells)
        console().print(f"Knee at {knee['concurrency']}: {knee['reason']}.")
        levels = [row["policy"]["concurrency"] for row in rows]
        panels = {
            "output tokens/s": {"": [(n, r["speed"]["output_tokens_per_s"]) for n, r in zip(levels, rows, strict=True)]},
            "TTFT, s": {
                p: [(n, r["speed"].get("ttft_s", {}).get(p)) for n, r in zip(levels, rows, strict=True)] for p in ("p50", "p95")
            },
            "TPOT, s": {
                p: [(n, r["speed"].get("tpot_s", {}).get(p)) for n, r in zip(levels, rows, strict=True)] for p in ("p50", "p95")
            },
            "peak memory, GiB": {"": [(n, r["memory"]["peak_bytes"] / 2**30) for n, r in zip(levels, rows, strict=True)]},
        }
        lines(
            run.folder / "concurrency.png",
            panels,
            f"Knee at {knee['concurrency']}: {knee['reason']}",
            "requests at once",
            True,
            knee["concurrency"],
        )


def find_knee(rows: list[dict[str, Any]], share: float, max_num_seqs: int) -> dict[str, Any]:
    """The smallest concurrency with `share` of the best tokens/s, and what stops the next level from doing better."""
    rates = [row["speed"]["output_tokens_per_s"] for row in rows]
    at = next(i for i, rate in enumerate(rates) if rate >= share * max(rates))
    beyond = rows[min(at + 1, len(rows) - 1)]
    level = beyond["policy"]["concurrency"]
    if len(rows) == 1:
        reason = "the only level tried"
    elif at == len(rows) - 1 and rates[at] > 1.5 * rates[at - 1]:
        reason = "not reached: tokens/s still grow at the highest level tried"
    elif beyond["cache"]["preemptions"] or beyond["memory"]["utilization_peak"] > _FULL:
        reason = f"the pool is exhausted ({beyond['memory']['utilization_peak']:.0%} in use at {level})"
    elif level > max_num_seqs:
        reason = f"queueing: scheduler.max_num_seqs={max_num_seqs} requests run at once, the others wait"
    else:
        slower = beyond["speed"]["tpot_s"]["p50"] / rows[at]["speed"]["tpot_s"]["p50"]
        reason = f"compute bound: with more requests a step takes longer ({slower:.2f}x per token at {level})"
    return {"concurrency": rows[at]["policy"]["concurrency"], "output_tokens_per_s": rates[at], "reason": reason}
