"""Every YAML of conf/experiment runs to its end, at toy size: found there, shrunk by the names of its settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import run
from experiments.harness import cli
from tests.experiments.toy import CONF, MODEL, NEEDED, composed, smaller

NAMES = cli.groups(CONF)["experiment"]


def small(name: str) -> list[str]:
    values = composed([f"experiment={name}"])
    real = [] if values["runner"]["name"] == "simulated" else [*MODEL, "data=pydoc"]
    return [*real, *smaller(values), *NEEDED.get(name, [])]


@pytest.fixture(scope="module")
def scales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scale file of the tiny model, for experiments that need one."""
    folder = tmp_path_factory.mktemp("scales")
    out = folder / "scales.safetensors"
    assert run.main([*small("calibrate"), "experiment=calibrate", "logger=none", f"out={out}", f"hydra.run.dir={folder}"]) == 0
    return out


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_at_toy_size_and_leaves_a_record(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = [f"scales={request.getfixturevalue('scales')}"] if name == "drift" else []
    given += [f"out={tmp_path / 'scales.safetensors'}"] if name == "calibrate" else []
    arguments = [f"experiment={name}", "logger=none", *small(name), *given, f"hydra.run.dir={tmp_path}"]
    if name == "compile_kernels":  # in a process of its own, where Triton's interpreter does not stand for its compiler
        pytest.importorskip("triton", reason="triton is not installed")
        environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{CONF.parent}:{CONF.parent / 'kernels'}"}
        command = [sys.executable, "-m", "experiments.run", *arguments]
        done = subprocess.run(command, cwd=CONF.parent, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        assert run.main(arguments) == 0, arguments
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["finished"]
    assert record["rows"]
    assert record["experiment"] == name
