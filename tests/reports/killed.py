"""Runs a command, kills it at random moments and starts it again as a user would, and compares what comes out in the end.

    python -m tests.reports.killed KIND[,KIND…] FOLDER SEED MOMENTS

A process of its own, which imports everything once and forks for each run: a fork of a process that has computed nothing with
several threads is safe, and a run then takes seconds. Prints one JSON list of what differed; an empty one is what it should be.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import run
from experiments.harness.base import EXPERIMENTS
from qkv.scales import ScaleFile
from tests.experiments.lm_support import save_tiny, write_tasks

TINY = ["model=llama3-8b-tiny", "model.dtype=float32", "data=pydoc"]
TIMES = ("seconds", "run_dir", "wall_s")


class Kind:
    """A command that can be killed. start: its arguments in a folder; again: those that go on with what is in `folder`."""

    def start(self, folder: Path) -> list[str]:
        raise NotImplementedError

    def again(self, folder: Path, former: Path) -> list[str]:
        """Default: the same command in the same place."""
        return self.start(former)

    def result(self, folder: Path) -> Any:
        rows = json.loads((folder / "record.json").read_text(encoding="utf-8"))["rows"]
        return without_times([{key: row.get(key) for key in ("label", "accuracy")} for row in rows])


class Frontier(Kind):
    def start(self, folder: Path) -> list[str]:
        small = ["documents=6", "tokens_per_document=64", "calibration_documents=6", "calibration={name: pydoc}", "budgets=[8]"]
        return ["experiment=frontier", *TINY, *small, "settings=[int8,rotated]", f"hydra.run.dir={folder}"]

    def again(self, folder: Path, former: Path) -> list[str]:
        kept = any((former / name).is_file() for name in ("sums.json", "statistics.safetensors"))
        return [*self.start(folder), *([f"resume={former}"] if kept else [])]


class Calibrate(Kind):
    def start(self, folder: Path) -> list[str]:
        small = ["sample.documents=12", "sample.tokens=64", "sample.held_back=2", "checkpoint_every=1", "quantizer=int8"]
        out = folder.parent / folder.name.partition("-")[0] / "scales.safetensors"
        out.parent.mkdir(exist_ok=True)
        return ["experiment=calibrate", *TINY, *small, f"out={out}", f"hydra.run.dir={folder}"]

    def result(self, folder: Path) -> Any:
        assert not list(folder.glob("*.checkpoint.safetensors"))
        return [ScaleFile.load(folder / "scales.safetensors").fingerprint(), super().result(folder)]


class Sweep(Kind):
    def start(self, folder: Path) -> list[str]:
        small = ["workload.num_requests=40", "surface_pools=[]", "surface_lengths=[]", "pool_tokens=8192"]
        sizes = "allocator.block_size=16,32"
        return ["-m", "experiment=throughput", "quantizer=none,int8", sizes, *small, f"hydra.sweep.dir={folder}"]

    def result(self, folder: Path) -> Any:
        found: list[Any] = [(folder / "report.html").is_file()]
        for job in range(4):
            record = json.loads((folder / str(job) / "record.json").read_text(encoding="utf-8"))
            lines = (folder / str(job) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            found.append([record["finished"], record["rows"], len(lines)])
        return found


class Accuracy(Kind):
    def __init__(self, place: Path) -> None:
        self.model, self.tasks = save_tiny(place / "model"), write_tasks(place / "tasks")

    def start(self, folder: Path) -> list[str]:
        small = ["documents=2", "schedule_documents=1", "tokens_per_document=64", "calibration_documents=2", "data=pydoc"]
        small += ["cache.num_blocks=64", "model.dtype=float32", "quantizers=[none,int8_token]", "task_metrics={}", "limit=3"]
        tasks = ["tasks=[toy_choice,toy_text]", f"task_folders=[{self.tasks}]", "model=path", f"model.path={self.model}"]
        return ["experiment=accuracy", *tasks, *small, f"hydra.run.dir={folder}"]

    def again(self, folder: Path, former: Path) -> list[str]:
        return [*self.start(folder), *([f"resume={former}"] if (former / "tasks").is_dir() else [])]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def child(arguments: list[str], log: Path) -> int:
    """Starts the run in a fork; returns its process id."""
    if pid := os.fork():
        return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 1
    try:
        code = run.main(arguments)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int, log: Path) -> None:
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, log.read_text(encoding="utf-8")[-3000:]


def main(name: str, place: Path, seed: int, moments: int) -> list[str]:
    make: dict[str, Callable[[], Kind]] = {
        "frontier": Frontier,
        "calibrate": Calibrate,
        "sweep": Sweep,
        "accuracy": lambda: Accuracy(place),
    }
    EXPERIMENTS.names()  # imports them
    if name == "accuracy":
        import lm_eval.tasks  # noqa: F401  once, and not in every child
    kind, log, rng, problems = make[name](), place / "log", random.Random(seed), list[str]()
    began = time.monotonic()
    ended(child(kind.start(place / "whole"), log), log)
    whole, took = kind.result(place / "whole"), time.monotonic() - began
    for i in range(moments):
        folder, moment = place / f"killed{i}", rng.uniform(0.05, 0.95) * took
        pid = child(kind.start(folder), log)
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        resumed = kind.again(place / f"killed{i}-again", folder)
        ended(child(resumed, log), log)
        at = next(word.partition("=")[2] for word in resumed if word.startswith(("hydra.run.dir=", "hydra.sweep.dir=")))
        if kind.result(Path(at)) != whole:
            problems.append(f"{name}, killed after {moment:.2f} of {took:.2f} s: another result")
    return problems


if __name__ == "__main__":
    different: list[str] = []
    for one in sys.argv[1].split(","):
        (Path(sys.argv[2]) / one).mkdir()
        different += main(one, Path(sys.argv[2]) / one, int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(different))
