"""Breaks the product on purpose, one small change at a time, and lists which test notices first.

Takes: mutations.toml, the present files. Gives: the table in README.md; exit status 1 if a mutation survived its tests.
Does not touch the checkout: every change is made in a temporary copy, with a cache of compiled kernels of its own.

    python -m tests.mutations                       all of them, in about half an hour
    python -m tests.mutations --only workload.py    those whose name or file contains the text
    python -m tests.mutations --write               all of them, and the table (after Ctrl-C: what was found by then)
    python -m tests.mutations --missing --write     those that the table lacks
"""

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "mutations.toml"
README = ROOT / "tests" / "README.md"
HEADER = ("| what is broken | where | the first test that notices |", "|---|---|---|")
START, END = "<!-- mutations: written by python -m tests.mutations --write -->", "<!-- end of mutations -->"
PYTEST = ("-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--timeout", "200", "--hypothesis-profile", "unshrunk")


class Stale(Exception):
    """A mutation that no longer fits the tree; the message names it and what to do."""


@dataclass(frozen=True)
class Mutation:
    """Replace `old`, which occurs exactly once in `file`, by `new`. tests: files, or node ids, that should notice.

    breaks: what the change does to the product, in a few words; it is also the mutation's name.
    """

    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """The changed text of the file below `root`. Raises Stale."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (found := text.count(self.old)) != 1 or self.old == self.new:
            raise Stale(
                f"mutation '{self.breaks}': its old text occurs {found} times in {self.file}, and must occur exactly once and "
                f"differ from the new text; correct the entry in tests/mutations.toml. The old text:\n{self.old}"
            )
        if missing := [test for test in self.tests if not (root / test.split("::")[0]).exists()]:
            raise Stale(f"mutation '{self.breaks}': there is no {', '.join(missing)}; correct the entry in tests/mutations.toml")
        return text.replace(self.old, self.new)

    @property
    def compiles(self) -> bool:
        return Path(self.file).suffix in (".h", ".cpp")


def mutations() -> list[Mutation]:
    """The list, in the file's order."""
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def warm_up() -> None:
    """Import what every test run would import anew for seconds. As tests/conftest.py does, before torch."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    sys.dont_write_bytecode = True  # a change within the same second and of the same length would go unseen
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in ("hypothesis.extra.numpy", "hypothesis.stateful", "transformers.modeling_utils"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()


def copy_tree(target: Path) -> None:
    """The checkout's files as they are now, committed or not, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def run_tests(root: Path, tests: Sequence[str], log: Path, cache: Path | None = None) -> int:
    """Start pytest below `root`; returns the process id. cache: where kernels are compiled to, None: the user's folder.

    Forked from this process, which has imported what takes seconds to import and nothing of the product.
    """
    if (child := os.fork()) == 0:
        status = 3
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.chdir(root)
            if cache is not None:
                os.environ["QKV_CACHE"] = str(cache)
            os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{root / 'kernels'}"
            sys.modules.pop("tests", None)
            sys.path[:] = [
                str(root),
                str(root / "kernels"),
                *(p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "kernels"))),
            ]
            if cache is not None:  # here, since a test that has to wait for the compiler could run out of time
                subprocess.run([sys.executable, "-m", "qkv_kernels.cpu"], stdout=output, stderr=output, check=True)
            status = int(pytest.main([*PYTEST, *tests]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child


class Workplace:
    """A copy of the tree in which one mutation at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log, self.cache = folder / "tree", folder / "log", folder / "cache"
        copy_tree(self.root)

    def start(self, mutation: Mutation) -> int:
        self.mutation, self.begun = mutation, time.monotonic()
        self.before = (self.root / mutation.file).read_text(encoding="utf-8")
        (self.root / mutation.file).write_text(mutation.apply(self.root), encoding="utf-8")
        return run_tests(self.root, mutation.tests, self.log, self.cache if mutation.compiles else None)

    def restore(self) -> None:
        (self.root / self.mutation.file).write_text(self.before, encoding="utf-8")
        shutil.rmtree(self.cache, ignore_errors=True)

    def end(self, status: int) -> str | None:
        """The first test that failed, None if none did. Raises RuntimeError if the tests did not run, which says nothing."""
        self.restore()
        output = self.log.read_text(encoding="utf-8", errors="replace")
        first = re.search(r"^(?:FAILED|ERROR) (\S+?::\w+)", output, re.MULTILINE)
        if status == 0:
            return None
        if status != 1 or not first:
            raise RuntimeError(f"mutation '{self.mutation.breaks}': pytest ended with status {status}:\n{output}")
        return first[1]


def try_all(chosen: Sequence[Mutation], folder: Path, jobs: int) -> dict[Mutation, str | None]:
    """The first test that notices, per mutation, in the list's order; and a line on each as it ends.

    Interrupted (Ctrl-C), it gives what was found by then.
    """
    left, results = list(reversed(chosen)), dict[Mutation, str | None]()
    idle, busy = [Workplace(folder / str(i)) for i in range(jobs)], dict[int, Workplace]()
    try:
        while left or busy:
            while left and idle:
                place = idle.pop()
                busy[place.start(left.pop())] = place
            child, status = os.wait()
            if child not in busy:
                continue  # not one of ours
            place = busy.pop(child)
            first = results[place.mutation] = place.end(os.waitstatus_to_exitcode(status))
            idle.append(place)
            progress = f"[{len(results)}/{len(chosen)}] {time.monotonic() - place.begun:4.0f} s  {place.mutation.breaks}"
            print(f"{progress}: {first or 'SURVIVED ' + ' '.join(place.mutation.tests)}", flush=True)
    except KeyboardInterrupt:
        for child, place in busy.items():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            place.restore()
        idle += busy.values()
    if noticing := sorted({first for first in results.values() if first}):
        print(f"{len(noticing)} tests noticed something; now without any mutation", flush=True)
        _, status = os.waitpid(run_tests(idle[0].root, noticing, idle[0].log), 0)
        if status:
            raise RuntimeError(f"the tests that noticed must pass when nothing is broken, and do not:\n{idle[0].log.read_text()}")
    return {mutation: results[mutation] for mutation in chosen if mutation in results}


def row(mutation: Mutation, first: str | None) -> str:
    file, _, test = (first or "").partition("::")
    shown = f"`{test}` in [{Path(file).name}]({Path(file).relative_to('tests')})" if first else "**none**"
    return f"| {mutation.breaks} | `{mutation.file}` | {shown} |"


def rows_of(text: str) -> dict[str, str]:
    """What is broken -> its row, of the table in README.md."""
    lines = text.partition(START)[2].partition(END)[0].splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ") and line != HEADER[0]}


def write(results: dict[Mutation, str | None]) -> None:
    """Renew the rows of these mutations, keep the others', drop those of mutations that are no longer in the list."""
    text = README.read_text(encoding="utf-8")
    rows = rows_of(text) | {m.breaks: row(m, first) for m, first in results.items()}
    table = [*HEADER, *(rows[m.breaks] for m in mutations() if m.breaks in rows)]
    before, _, rest = text.partition(START)
    README.write_text("\n".join((f"{before}{START}\n", *table, f"\n{END}")) + rest.partition(END)[2], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="mutations whose name or file contains it")
    parser.add_argument("--missing", action="store_true", help="mutations without a row in the table")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--write", action="store_true", help="write what was found into the table of tests/README.md")
    asked = parser.parse_args()
    chosen = [m for m in mutations() if asked.only.lower() in f"{m.breaks} {m.file}".lower()]
    if not chosen:
        parser.error(f"no mutation's name or file contains '{asked.only}'")
    if asked.missing:
        known = rows_of(README.read_text(encoding="utf-8"))
        chosen = [m for m in chosen if m.breaks not in known]
    started = time.monotonic()
    warm_up()
    try:
        for mutation in chosen:
            mutation.apply(ROOT)
        with tempfile.TemporaryDirectory(prefix="qkv-mutations-") as folder:
            results = try_all(chosen, Path(folder), asked.jobs)
    except (Stale, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    if asked.write:
        write(results)
    survivors = sum(first is None for first in results.values())
    print(f"{len(results) - survivors} of {len(results)} mutations noticed in {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # libraries that were imported to be ready only complain when they are taken down
