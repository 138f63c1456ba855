"""The import contracts of pyproject.toml hold, and they would notice if they did not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'kernels'}"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_map_has_a_line_for_every_module() -> None:
    """qkv/README.md; folders whose files are alike (policies, models, metrics) have one line for all."""
    text = (ROOT / "qkv" / "README.md").read_text(encoding="utf-8")
    modules = [p for folder in ("", "attention", "cache") for p in (ROOT / "qkv" / folder).glob("*.py") if p.stem != "__init__"]
    missing = [name for name in (str(p.relative_to(ROOT / "qkv")) for p in modules) if f"`{name}`" not in text]
    assert not missing


def test_the_import_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("qkv/scheduler.py", "import torch"),
        ("qkv/types.py", "import qkv.scheduler"),
        ("qkv/validate.py", "import hydra"),
        ("qkv/policies/evictor/lru.py", "import qkv.cache.block_manager"),
        ("qkv/engine.py", "import experiments"),
        ("kernels/qkv_kernels/format.py", "import qkv.layout"),
        ("qkv/stray.py", ""),
        ("experiments/studies/plan.py", "import experiments.studies.compare"),
        ("experiments/harness/table.py", "import experiments.measuring.bits"),
        ("experiments/stray.py", ""),
        ("calibration/fitting/search.py", "import experiments.harness.table"),
    ],
    ids=lambda value: value.replace("/", "."),
)
def test_a_forbidden_import_is_noticed(file: str, line: str, tmp_path: Path) -> None:
    for name in ("qkv", "kernels", "experiments", "calibration"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / file
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    assert lint(tmp_path).returncode == 1
