"""The script for a GPU, without one: every part runs on tiny shapes in Triton's interpreter, and it writes its record."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from experiments import gpu_check
from experiments.gpu import bench

ROOT = Path(__file__).resolve().parents[2]
LEAN = """
import sys
for name in ("hydra", "omegaconf", "rich", "wandb", "matplotlib", "datasets", "psutil", "gguf", "accelerate"):
    sys.modules[name] = None
import qkv.engine, qkv.models, experiments.gpu_check
from experiments.gpu_check import main
raise SystemExit(main(["--help"]))
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_help_needs_no_gpu_and_none_of_the_packages_a_gpu_machine_lacks() -> None:
    done = python("-c", LEAN)
    assert done.returncode == 0, done.stderr
    assert "--minutes" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_correctness_of_a_format(name: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    row = gpu_check.check_format(name, "cpu", "float32", 64)
    assert row["errors"] == []
    assert 0 < row["decode_error"] < 1e-4


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["int8_sinks", *(pytest.param(n, marks=pytest.mark.slow) for n in ("kivi4", "kivi3", "kivi2"))])
def test_correctness_of_a_format_with_raw_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("experiments.gpu.raw_rows.STEPS", ([20, 3, 17], [1, 1, 1], [14, 1, 2]))
    row = gpu_check.check_format(name, "cpu", "float32", 64)
    assert row["errors"] == []
    assert 0 < row["step_error"] < 1e-4
    monkeypatch.setattr("qkv_kernels.triton.blocks.keep_first", lambda *_: None)
    assert name != "int8_sinks" or gpu_check.check_format(name, "cpu", "float32", 64)["errors"]


@pytest.mark.interpreter
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("qkv_kernels.triton.decode.decode", lambda q, *_: _[5].copy_(q))
    monkeypatch.setattr("qkv_kernels.triton.append.append", lambda *_: None)
    errors = gpu_check.check_format("int8", "cpu", "float32", 64)["errors"]
    assert [e.split(":")[0] for e in errors] == ["append", "append", "append", "decode"]


def test_pages_of_a_benchmark_hold_finite_numbers_and_every_table_other_pages() -> None:
    shape = bench.Shape(2, 32, 4, 2, 64)
    for formats in gpu_check.TIMED.values():
        pages = bench.make_pages(formats, shape, torch.device("cpu"), rotate_bytes=3 * int(shape.kv_bytes(formats)))
        assert torch.isfinite(pages.k.codes.float()).all()
        assert len(pages.tables) == 3
        assert len(torch.cat(pages.tables).unique()) == 3 * 2 * 2
        assert int(torch.cat(pages.tables).min()) >= 1


def test_bytes_and_operations_of_a_shape() -> None:
    shape = bench.Shape(64, 8192)
    assert shape.kv_bytes(gpu_check.TIMED["bf16"]) == 64 * 8192 * 8 * 128 * 2 * 2
    assert bench.attention_flops(bench.Shape(1, 10), 10) == 4 * 32 * 128 * 55


def test_formats_that_no_time_is_left_for_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def late(futures: object, timeout: float) -> None:
        assert timeout >= 30
        raise TimeoutError

    monkeypatch.setattr(gpu_check, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(gpu_check, "as_completed", late)
    monkeypatch.setattr(gpu_check, "check_format", lambda *job: {"format": job[0], "errors": ["late"]})
    check = gpu_check.Check(torch.device("cpu"), 0, tmp_path, smoke=False)
    assert check.correctness(["int8", "int4"]) == 0
    assert check.record.data["skipped"] == ["correctness int4", "correctness int8"]


def test_targets_are_judged_by_what_was_measured() -> None:
    def row(op: str, fmt: str, s: float, backend: str = "triton", shape: str = "a", **more: float) -> dict[str, object]:
        return {"op": op, "format": fmt, "backend": backend, "shape": shape, "seconds": s} | more

    rows = [
        row("decode", "bf16", 1.0, fraction_of_copy_bandwidth=0.9),
        row("decode", "int8", 0.5, fraction_of_copy_bandwidth=0.7, speedup_vs_bf16=2.0),
        row("append", "int8", 0.01),
        row("extend", "int8", 4.0, shape="p", new=9),
        row("extend", "int8", 9.0, shape="p", new=2),
        row("extend", "bf16", 3.0, backend="sdpa", shape="p", new=9),
    ]
    assert list(gpu_check.verdicts(rows, "a")) == [
        ("decode bf16, of copy bandwidth", 0.9, 0.85, True),
        ("decode int8, of copy bandwidth", 0.7, 0.75, True),
        ("decode int8, times bf16", 2.0, 1.7, True),
        ("append int8, of decode", 0.02, 0.03, False),
        ("extend int8 p, of sdpa", 0.75, 0.5, True),
    ]
    assert list(gpu_check.verdicts([], "a")) == []


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    done = python("-m", "experiments.gpu_check", "--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert {name.split()[0] for name in record.get("failed", {})} <= {"flash_attn", "flashinfer"}  # where they are not installed
    kernels = [row["kernel"] for row in record["rows"] if "kernel" in row]
    assert {k["op"] for k in kernels} == {"decode", "append", "extend"}
    assert [row["policy"]["quantizer"] for row in record["rows"] if "policy" in row] == ["none", "fp8", "int8_token"]
