"""Minutes of everything at once. A toy-size run is among those of every experiment."""

import json
from pathlib import Path

import pytest

from experiments import run

KINDS = {"abort", "allocator", "bad request", "callback", "clock", "evictor", "forward", "host memory", "out of memory", "output"}
KINDS |= {"preemptor", "sampling", "stream left", "swap copy"}
SELDOM = {"host memory", "swap copy"}  # either ends an engine's swapping, so on a slow machine one of them may not be met


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_minutes_of_threads_and_faults_change_no_answer_and_leave_nothing_behind(tmp_path: Path) -> None:
    assert run.main(["experiment=soak", "minutes=5", "logger=none", f"hydra.run.dir={tmp_path}"]) == 0
    (row,) = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["rows"]
    faults = row["soak"]["faults"]
    assert KINDS - SELDOM <= set(faults) <= KINDS, "a kind of fault was never met"
    assert SELDOM & set(faults)
    assert all(kind["survived"] == kind["injected"] > 0 for kind in faults.values())
    assert row["soak"]["ended"]["length"] > 100
