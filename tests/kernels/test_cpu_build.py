"""Building the CPU kernels: once, safely between processes, and with a way out when there is no compiler."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qkv.attention import cpu as backend
from qkv.attention.base import choose_backend
from qkv.errors import ConfigError
from qkv_kernels import cpu
from qkv_kernels.cpu import build
from tests.kernels.formats import FORMATS, Stored
from tests.kernels.paged import CPU, bound, shape

FAKE = """#!/bin/sh
echo "$@" >> "{log}"
if [ "$1" = --version ]; then echo fake; exit 0; fi
sleep 0.2
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo made > "$2"; fi; shift; done
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its arguments to the returned file and makes whatever it is asked for."""
    log, script = tmp_path / "log", tmp_path / "fakecxx"
    script.write_text(FAKE.format(log=log))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    return log


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizer's library the Linux way")
def test_the_kernels_tests_pass_under_the_address_sanitizer() -> None:
    """Every format, odd head dims and random pages, with each access checked against the bounds of its allocation."""
    cxx = build.compiler()
    runtime = subprocess.run([cxx, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{cxx} has no address sanitizer here")
    path = build.library(("-fsanitize=address", "-fno-omit-frame-pointer", "-g1"))
    chosen = (
        "any_layer or any_pair or head_dims or query_heads or window or linear or norm or (reference_and_stores and bfloat16)"
    )
    root = Path(__file__).parents[2]
    tests = [str(Path(__file__).with_name(f"test_cpu_{part}.py")) for part in ("attend", "raw_rows", "frame")]
    arguments = ["-q", "-x", "-p", "no:cacheprovider", *tests, "-k", chosen]
    code = f"from qkv_kernels import cpu; cpu.load({str(path)!r}); import pytest; raise SystemExit(pytest.main({arguments!r}))"
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join(map(str, (Path(cpu.__file__).parents[2], root))),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


HEADERS = sorted(build.SOURCES.glob("*.h"))


@pytest.mark.parametrize("name", ["portable", *(pytest.param(name, marks=pytest.mark.slow) for name in ("avx2", "avx512"))])
def test_every_header_includes_what_it_uses(name: str, tmp_path: Path) -> None:
    """Each header compiles by itself, for every instruction set."""
    if name != "portable" and not build.X86:
        pytest.skip(f"{name} is of x86-64")
    try:
        cxx = build.compiler()
    except cpu.BuildError as error:
        pytest.skip(str(error))
    for header in HEADERS:
        alone = tmp_path / f"{header.stem}.cpp"
        alone.write_text(f'#include "{header}"\n')
        done = subprocess.run(
            [cxx, *build.FLAGS, *build.INSTRUCTION_SETS[name], "-fsyntax-only", str(alone)], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{header.name}: {done.stderr[:2000]}"


def links(log: Path) -> int:
    return sum("-shared" in line for line in log.read_text().splitlines())


def test_builds_once_and_again_only_when_something_changed(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = build.library()
    assert "once" in capsys.readouterr().err
    assert first.is_file()
    assert build.library() == first
    assert links(fake) == 1
    assert capsys.readouterr().err == ""
    assert build.library(("-g",)) != first, "other flags are another library"
    assert links(fake) == 2
    assert not [p for p in first.parent.iterdir() if p.is_dir()], "temporary files are removed"


def test_two_processes_build_once(fake: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(cpu.__file__).parents[2])}
    command = [sys.executable, "-m", "qkv_kernels.cpu"]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {p.communicate(timeout=120)[0] for p in processes}
    assert all(p.returncode == 0 for p in processes)
    assert len(paths) == 1
    assert links(fake) == 1


def test_a_failing_compiler_is_reported_and_leaves_nothing(fake: Path) -> None:
    script = Path(os.environ["CXX"])
    script.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'disk is on fire' >&2\nexit 1\n")
    with pytest.raises(cpu.BuildError, match="disk is on fire"):
        build.library()
    cache = Path(os.environ["QKV_CACHE"]) / "cpu"
    assert not list(cache.glob("*.so"))


def test_an_unwritable_cache_names_the_variable(fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(cpu.BuildError, match="QKV_CACHE"):
        build.library()


def test_without_a_compiler_auto_is_the_reference_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(backend, "_unavailable", backend.lru_cache(backend._unavailable.__wrapped__))
    monkeypatch.setattr(cpu, "_loaded", False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            chosen, why = choose()
            assert chosen.name == "reference"
            assert "no-such-compiler" in why
    assert len([r for r in caplog.records if "no-such-compiler" in r.message]) == 1
    with pytest.raises(ConfigError, match="no-such-compiler"):
        choose("cpu")


def choose(name: str = "auto", fmt: str = "int8-token-none", D: int = 64, **more: object) -> tuple:
    layer = shape(Dk=D)
    quantizer = bound(Stored(FORMATS[fmt], FORMATS[fmt]), [layer])
    return choose_backend(name, [quantizer.formats(0)], [layer], 16, CPU, True, **more)  # type: ignore[arg-type]


def test_auto_takes_the_cpu_kernels_and_says_why_not() -> None:
    try:
        cpu.load()
    except cpu.BuildError as error:
        pytest.skip(str(error))
    assert choose()[0].name == "cpu"
    assert choose(deterministic=True)[0].name == "cpu"
    for more, reason in (
        ({"dtype": torch.float64}, "float64"),
        ({"reads": "raw"}, "reads=raw"),
    ):
        chosen, why = choose(**more)
        assert chosen.name == "reference"
        assert reason in why
        with pytest.raises(ConfigError, match=reason):
            choose("cpu", **more)


def test_an_instruction_set_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        cpu.load()
    except cpu.BuildError as error:
        pytest.skip(str(error))
    for value in ("sse9", ""):
        monkeypatch.setenv("QKV_CPU_ISA", value)
        with pytest.raises(ValueError, match="portable"):
            cpu.instruction_set()
    monkeypatch.setenv("QKV_CPU_ISA", "portable")
    assert cpu.instruction_set() == "portable"
