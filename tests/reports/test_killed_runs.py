"""A run that was killed at any moment, and is started again, comes to the result of one that was not."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("frontier", "calibrate", "sweep", "accuracy")


def problems(kind: str, folder: Path, seed: int, moments: int) -> list[str]:
    if kind == "accuracy" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.reports.killed", kind, str(folder), str(seed), str(moments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_that_was_killed_once_resumes_to_the_same_result(tmp_path: Path) -> None:
    assert problems("frontier,calibrate,sweep", tmp_path, seed=1, moments=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_at_random_moments_resumes_to_the_same_result(kind: str, tmp_path: Path) -> None:
    assert problems(kind, tmp_path, seed=2, moments=5) == []
