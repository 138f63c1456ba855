"""The recipe of CONTRIBUTING.md works as written: its files, and what `make policy` writes, keep every contract.

All of it happens in a copy of the repository, so the policies of the recipe exist nowhere else.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("allocator", "evictor", "preemptor", "quantizer")
FILE = re.compile(r"^`(?P<path>\S+\.(?:py|yaml))`\n\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def recipe() -> dict[str, str]:
    """Path -> content of the files that CONTRIBUTING.md shows."""
    return {m["path"]: m["text"] for m in FILE.finditer((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory, recipe: dict[str, str]) -> Path:
    """The repository with the recipe's files and one policy of every kind as `make policy` writes it."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("qkv", "kernels", "conf", "calibration", "experiments", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "test_new_policy.py"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path, text in recipe.items():
        (folder / path).write_text(text, encoding="utf-8")
    for kind in KINDS:
        done = run(folder, "experiments.new_policy", "create", kind, f"new_{kind}")
        assert done.returncode == 0, done.stderr
        assert f"make check-policy NAME=new_{kind}" in done.stdout
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'kernels'}"}
    env.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run([sys.executable, "-m", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_recipe_shows_an_evictor_and_a_quantizer_with_their_settings(recipe: dict[str, str]) -> None:
    assert [Path(p).parts[-2] for p in recipe] == ["evictor", "evictor", "quantizer", "quantizer"]


def test_new_policies_keep_the_contracts_with_nothing_else_edited(copy: Path, recipe: dict[str, str]) -> None:
    names = {Path(p).stem for p in recipe} | {f"new_{kind}" for kind in KINDS}
    done = run(copy, "pytest", "-v", "-p", "no:cacheprovider", "tests/contracts", "-k", " or ".join(names))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    for name in names:
        assert re.search(rf"{name}\b.* PASSED", done.stdout), f"no contract test ran on {name}"


def test_what_make_policy_writes_passes_lint(copy: Path) -> None:
    files = [str(p) for p in copy.rglob("*.py") if p.stem.startswith("new_") or p.stem in ("deep_first", "int4_plain")]
    assert len(files) >= 6
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        done = run(copy, *command, *files)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("evictr", "gdsf", "KIND='evictr' is not a kind of policy; did you mean 'evictor'"),
        ("", "gdsf", "KIND='' is not a kind of policy; Allowed: allocator, evictor, preemptor, quantizer"),
        ("evictor", "", "NAME='' cannot name a file"),
        ("evictor", "Gdsf", "NAME='Gdsf' cannot name a file"),
        ("evictor", "_gdsf", "cannot name a file"),
        ("evictor", "../gdsf", "cannot name a file"),
        ("evictor", "class", "cannot name a file"),
        ("evictor", "lru", "NAME='lru' is taken"),
        ("evictor", "base", "NAME='base' is taken"),
    ],
)
def test_make_policy_refuses_bad_and_taken_names(kind: str, name: str, message: str) -> None:
    from experiments.new_policy import create
    from qkv.errors import ConfigError

    with pytest.raises(ConfigError, match=re.escape(message)):
        create(kind, name)


def test_check_policy_names_what_it_does_not_find() -> None:
    from experiments.new_policy import check
    from qkv.errors import ConfigError

    with pytest.raises(ConfigError, match="NAME='lruu' is no policy; did you mean 'lru'"):
        check("lruu")
    with pytest.raises(ConfigError, match="NAME='lru' is no quantizer"):
        check("lru", "quantizer")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_check_policy_runs_contracts_and_experiment_and_says_ok(copy: Path, kind: str) -> None:
    done = run(copy, "experiments.new_policy", "check", f"new_{kind}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"OK: {kind} 'new_{kind}' keeps its contracts and ran" in done.stdout


@pytest.mark.slow
def test_check_policy_says_which_contract_breaks(copy: Path) -> None:
    source = copy / "qkv" / "policies" / "evictor" / "new_evictor.py"
    text = source.read_text()
    try:
        source.write_text(text + "\n    def pop(self, n: int) -> list[int]:\n        return []\n")
        done = run(copy, "experiments.new_policy", "check", "new_evictor")
    finally:
        source.write_text(text)
    assert done.returncode == 1
    assert "FAIL: evictor 'new_evictor' breaks its contracts" in done.stdout
