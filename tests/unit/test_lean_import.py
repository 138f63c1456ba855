"""What importing costs: planning without torch, the library without Hydra, policies without a device, `kernels` unshadowed.

Each case runs in its own interpreter, in which the forbidden modules cannot be imported.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]

IMPORT_ALL = """
import importlib, pkgutil, sys

def walk(package):
    yield package
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        yield module.name

def block(*names):
    for name in names:
        sys.modules[name] = None
"""
TORCH_FREE = [
    "qkv.cache.block_manager",
    "qkv.cache.host_pool",
    "qkv.cache.prefix",
    "qkv.config",
    "qkv.metrics.recorder",
    "qkv.scheduler",
    "qkv.types",
]


def python(code: str, *path: Path) -> str:
    """Run `code` from the repository root with the project, then `path`, importable; its output."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "kernels", *path]))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planning_and_block_policies_import_without_torch() -> None:
    python(
        IMPORT_ALL
        + f"""
block("torch", "transformers", "numpy")
for name in {TORCH_FREE}:
    importlib.import_module(name)
for kind in ("evictor", "preemptor", "allocator"):
    for name in walk(f"qkv.policies.{{kind}}"):
        importlib.import_module(name)
"""
    )


def test_the_package_itself_is_lean_and_offers_its_names_when_they_are_asked_for() -> None:
    python(
        """
import sys
import qkv
assert not {"torch", "transformers", "numpy", "qkv.types"} & set(sys.modules), "import qkv imports more than itself"
from qkv import SamplingParams
assert not {"torch", "transformers", "numpy"} & set(sys.modules), "sampling parameters need no torch"
assert set(qkv.__all__) <= set(dir(qkv))
from qkv import Engine
from qkv.engine import Engine as same
assert Engine is same and SamplingParams is sys.modules["qkv.types"].SamplingParams
assert all(getattr(qkv, name).__name__ == name for name in qkv.__all__)
try:
    qkv.Motor
except AttributeError as error:
    assert "offers Engine" in str(error)
else:
    raise AssertionError("an unknown name was found")
"""
    )


def test_the_library_imports_no_command_line_and_no_sinks() -> None:
    blocked = "hydra", "omegaconf", "wandb", "matplotlib", "datasets", "rich"
    python(IMPORT_ALL + f"block{blocked}\nfor name in walk('qkv'):\n    importlib.import_module(name)")


def test_importing_policies_is_cheap_and_touches_no_device() -> None:
    python(
        IMPORT_ALL
        + """
import torch

def touched(*args, **kwargs):
    raise AssertionError("a policy module touched the device while being imported")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = touched
for name in walk("qkv.policies"):
    importlib.import_module(name)
heavy = {"transformers", "accelerate", "triton"} & set(sys.modules)
assert not heavy, f"importing policies imports {heavy}"
"""
    )


@pytest.mark.parametrize("installed", [False, True], ids=["absent", "installed"])
def test_our_kernels_folder_does_not_shadow_the_package_that_transformers_looks_for(installed: bool, tmp_path: Path) -> None:
    if installed:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("def __getattr__(name):\n    return type(name, (), {})\n")
        info = tmp_path / "kernels-99.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 99\n")
    python(
        f"""
import kernels, transformers
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available("0", "100") is {installed}
assert bool(getattr(kernels, "__file__", None)) is {installed}
from transformers import LlamaForCausalLM
""",
        tmp_path,
    )


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_the_kernels_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in ("qkv", "kernels", "conf", "calibration", "experiments", "tests"):
        shutil.copytree(ROOT / folder, source / folder)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" not in n]
    assert {n.split("/")[0] for n in names} == {"qkv", "qkv_kernels"}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "qkv").rglob("*.py")}
    sources |= {
        str(p.relative_to(ROOT / "kernels"))
        for p in (ROOT / "kernels" / "qkv_kernels").rglob("*")
        if p.suffix in {".py", ".cpp", ".h"}
    }
    assert sources <= set(names), f"missing from the wheel: {sources - set(names)}"
