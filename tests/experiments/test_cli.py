"""The command line: help, and one clear message with exit code 2 for every mistake, before a model loads."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import run
from experiments.harness import base
from qkv.errors import ConfigError
from qkv.policies.evictor.base import EVICTORS

ROOT = Path(__file__).parents[2]
TINY = ["model=llama3-8b-tiny", "data=pydoc", "logger=none"]


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
    """The message of a command that must end with code 2 and leave nothing behind."""
    folder = tmp_path / "runs" / "one"
    assert run.main([*arguments, f"hydra.run.dir={folder}"]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith("error: ")
    assert "record:" not in captured.out
    assert not folder.exists()
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "choose what to do: experiment=NAME. Allowed: "),
        (["experiment=comprae"], "unknown experiment 'comprae'; did you mean 'compare'?"),
        (["experiment=compare", "quantizer=int9"], "unknown quantizer 'int9'; did you mean 'int8'?"),
        (["experiment=compare", "quantizrs=[none]"], "unknown key 'quantizrs'; did you mean 'quantizers'?"),
        (["experiment=compare", "evicter=lru"], "unknown key 'evicter'; did you mean 'evictor'?"),
        (["experiment=compare", "model.dtyp=float32"], "unknown key 'model.dtyp'; did you mean 'dtype'?"),
        (["experiment=compare", "modle.dtype=float32"], "unknown key 'modle.dtype'; did you mean 'model'?"),
        (["experiment=compare", "model.name.x=1"], "model.name is a value and has no keys"),
        (["experiment=compare", "~mdl"], "unknown key 'mdl'; did you mean 'model'?"),
        (["experiment=compare", "+documens=3"], "unknown key 'documens'; did you mean 'documents'?"),
        (["experiment=compare", "+scheduler.max_seqs=3"], "unknown key 'max_seqs'; did you mean 'max_num_seqs'?"),
        (["experiment=compare", "quantizers=[none,int9]"], "unknown quantizer 'int9'; did you mean 'int8'?"),
        (["experiment=compare", "quantizers=[{name: fp8, formt: e5m2}]"], "unknown key 'formt'; did you mean 'format'?"),
        (["experiment=compare", "quantizers=[{name: fp8, format: e3m4}]"], "'e3m4' is not allowed"),
        (["experiment=compare", "quantizers=[int8,int8]"], "each at most once"),
        (["experiment=compare", "quantizers=int8"], "expected a list"),
        (["experiment=bench_engine", "cases=[8by256]"], "cases='8by256' is not allowed; it must be REQUESTSxPROMPT tokens"),
        (["experiment=bench_engine", "baseline=transfomers"], "did you mean 'transformers'?"),
        (["experiment=compare", "documents=0"], "documents=0 is not allowed; it must be at least 1"),
        (["experiment=compare", "seed=abc"], "seed: expected int, got 'abc'"),
        (["experiment=compare", "allocator.block_size=17"], "block_size=17 is not allowed"),
        (["experiment=compare", "workload.output_tokens=1"], "output_tokens=1 is not allowed"),
        (["experiment=compare", "cache.memory_bytes=12parsec"], "'12parsec' is not a size"),
        (["experiment=compare", "model.dtype=float31"], "did you mean 'float32'?"),
        (["experiment=compare", "model.name=smollm3"], "unknown model 'smollm3'; did you mean 'smollm2'?"),
        (["experiment=compare", "model=hub"], "model.id is needed: add model.id=..."),
        (["experiment=compare", "data=jsonl", "data.path=missing.jsonl"], "'missing.jsonl' does not exist"),
        (["experiment=compare", "scales=missing.safetensors"], "'missing.safetensors' is not a file"),
        (["experiment=compare", "policy_modules=[no_such_module]"], "cannot import 'no_such_module'"),
        (["experiment=generate", "prompts=[]"], "at least one prompt"),
        (["experiment=generate", "sampling.temperature=nan"], "temperature=nan is not allowed"),
        (["experiment=generate", "sampling.max_tokens=0"], "max_tokens=0 is not allowed"),
        (["experiment=compare", "runner=simulated"], "runner=simulated: experiment=compare needs a real model"),
        (["experiment=generate", "runner=simulated"], "use runner=default, or one of the experiments that can be simulated: "),
        (["experiment=compare", "workload=chat"], "workload: experiment=compare sends requests that are all alike"),
        (["experiment=bench_simulator", "runner=default"], "use runner=simulated"),
        (["experiment=compare", "quantizers=[none,"], "cannot read 'quantizers=[none,'"),
    ],
)
def test_a_mistake_is_one_message_before_any_model_loads(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("experiments.studies.compare.load_model", load)
    monkeypatch.setattr("experiments.studies.generate.load_model", load)
    assert expected in refused(capsys, tmp_path, *arguments)


def test_help_lists_every_group_and_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("bench_engine", "compare", "demo", "generate", "int8_token", "smollm2", "llama3-8b-tiny", "--cfg job"):
        assert word in text
    assert "$" not in text


def test_an_error_of_the_run_is_one_line_exit_code_1_and_a_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    too_long = ["experiment=generate", *TINY, "quantizer=none", "scheduler.max_model_len=8", "prompts=[a long long prompt]"]
    assert run.main([*too_long, f"hydra.run.dir={tmp_path}"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("error:") == 1
    assert "Traceback" not in captured.err
    assert captured.out.splitlines()[-1].startswith("record: ")
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["error"] in captured.err


def test_a_bug_keeps_its_traceback_and_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("experiments.studies.bench_scheduler.BenchScheduler.run", broken)
    with pytest.raises(ZeroDivisionError):
        run.main(["experiment=bench_scheduler", f"hydra.run.dir={tmp_path}"])
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["error"] == "ZeroDivisionError: a bug"


def test_every_combination_of_a_sweep_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", "experiment=bench_scheduler", "evictor=lru,fifo", f"hydra.sweep.dir={tmp_path}"]
    assert run.main([*sweep, "batch_sizes=[2]", "context_lengths=[32]", "steps=2", "shared_prefix_tokens=0"]) == 0
    names = [json.loads(p.read_text())["config"]["evictor"]["name"] for p in sorted(tmp_path.glob("*/record.json"))]
    assert names == ["lru", "fifo"]


def test_an_out_of_tree_policy_is_usable_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_evictor.py").write_text(
        "from dataclasses import dataclass\n"
        "from qkv.policies.evictor.base import EVICTORS, PriorityEvictor\n"
        '@EVICTORS.register("mine_for_a_test")\n'
        "@dataclass\n"
        "class Mine(PriorityEvictor):\n"
        "    def priority(self, meta):\n"
        "        return -meta.last_step\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"experiment": "bench_scheduler", "policy_modules": ["my_evictor"], "evictor": {"name": "mine_for_a_test"}}
    config |= {"data": {"name": "pydoc"}, "logger": {"name": "none"}}
    try:
        _, built = base.build(config, tmp_path / "out")
        assert built.engine.evictor == {"name": "mine_for_a_test"}
    finally:
        EVICTORS._classes.pop("mine_for_a_test", None)
    with pytest.raises(ConfigError, match="unknown evictor 'mine_for_a_test'"):
        base.build(config, tmp_path / "out")


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    """A real SIGINT, once the first row is on disk: the record says so, and the exit code is 130."""
    command = [sys.executable, "-m", "experiments.run", "experiment=bench_scheduler", f"hydra.run.dir={tmp_path}"]
    endless = "batch_sizes=[2" + ",512" * 500 + "]"
    command += [endless, "context_lengths=[64]", "steps=400", "shared_prefix_tokens=0", "logger=jsonl"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background job ignores it
    )
    record = tmp_path / "record.json"
    try:
        deadline = time.monotonic() + 120
        while not (record.exists() and json.loads(record.read_text())["rows"]):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert out.splitlines()[-1].startswith("record: ")
    values = json.loads(record.read_text())
    assert values["interrupted"] is True
    assert values["rows"]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == len(values["rows"])


@pytest.mark.parametrize("wrong", [[], ["experiment=compare", "quantizers=[none,int9]"]])
def test_a_run_leaves_no_log_open(wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever logs afterwards in the same process would write into a folder that may be gone."""
    before = list(logging.getLogger().handlers)
    run.main([*(wrong or ["experiment=plan"]), f"hydra.run.dir={tmp_path / 'run'}"])
    assert [h for h in logging.getLogger().handlers if h not in before] == []
