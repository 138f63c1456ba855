"""Compiles the C++ kernels once and keeps the library in the user's cache folder.

Takes: a C++ compiler ($CXX, g++, clang++ or c++) and torch's headers. Gives: the path of a shared library.
Does not know about: what is in the sources.

`python -m qkv_kernels.cpu` builds ahead of time. QKV_CACHE names another cache folder (default: XDG_CACHE_HOME or
~/.cache, then qkv).
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.cpp_extension import include_paths

from qkv_kernels.folders import cache_root

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-Wno-psabi")
# at::parallel_for is an inline OpenMP region: without this flag it compiles to a loop on one thread, silently.
OPENMP = "-fopenmp"
X86 = platform.machine() in ("x86_64", "AMD64")
# One object per instruction set, chosen at run time: isa.h says what each is. Other machines than x86-64 get the portable one,
# for the baseline of their architecture.
INSTRUCTION_SETS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
        *("-mavx512vbmi", "-mavx512vnni", "-mavx512bf16"),
    ),
}


class BuildError(Exception):
    """No compiler, or it failed; the message says what to do."""


def compiler() -> str:
    """$CXX or the first of g++, clang++, c++ on the PATH. Raises BuildError."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "clang++", "c++"]:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler ({asked or 'g++, clang++ or c++'}) on the PATH; install g++ or set CXX")


def library(extra: tuple[str, ...] = ()) -> Path:
    """The compiled library for this torch, compiler and source, built if it is not there. Safe between processes.

    extra: more compiler and linker flags, e.g. -fsanitize=address. Raises BuildError.
    """
    cxx = compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256(repr((version, torch.__version__, FLAGS, OPENMP, INSTRUCTION_SETS, extra, platform.machine())).encode())
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".h", ".cpp"):
            key.update(file.name.encode() + b"\0" + file.read_bytes())
    folder = cache_root() / "cpu"
    target = folder / f"qkv_cpu-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):  # the second process waits, then finds the library
            if not target.exists():
                print(f"qkv: compiling the CPU kernels with {cxx}, once (about a minute): {target}", file=sys.stderr, flush=True)
                _build(cxx, version, extra, target)
    except OSError as error:
        raise BuildError(f"cannot write to the cache folder {folder}: {error}; set QKV_CACHE to another one") from error
    return target


def _build(cxx: str, version: str, extra: tuple[str, ...], target: Path) -> None:
    """Compile every object, side by side, link, and move the result into place in one step."""
    sets = INSTRUCTION_SETS if X86 else {"portable": ()}
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    headers = [f"-isystem{path}" for path in include_paths()]
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        out = Path(temporary)
        jobs = [
            [cxx, *FLAGS, OPENMP, *extra, abi, *headers, "-c", str(source), "-o", str(out / f"{source.stem}.o")]
            for source in sorted(SOURCES.glob("*ops.cpp"))
        ]
        for source in sorted(SOURCES.glob("*kernels.cpp")):
            for name, flags in sets.items():
                jobs.append([cxx, *FLAGS, *extra, *flags, "-c", str(source), "-o", str(out / f"{source.stem}-{name}.o")])
        objects = [job[-1] for job in jobs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        lib = Path(torch.__file__).parent / "lib"
        shared = out / target.name
        # g++'s OpenMP calls find torch's own libgomp, and so its thread pool; clang's need a runtime of their own.
        openmp = [OPENMP] if "clang" in version else []
        libraries = [*openmp, f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
        _run([cxx, "-shared", *extra, *objects, *libraries, "-o", str(shared)])
        os.replace(shared, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"{shlex.join(command[:1])} failed: " + "\n".join(lines[:20]))
