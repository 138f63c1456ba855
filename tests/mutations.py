"""Breaks the product on purpose, one small change at a time, and lists which test notices first.

Takes: mutations.toml, the present files. Gives: the table in README.md; exit status 1 if a mutation survived its tests.
Does not touch the checkout: every change is made in a temporary copy, with a cache of compiled kernels of its own.

    python -m tests.mutations                     all of them, about half an hour
    python -m tests.mutations --only "masks"      those whose name or file contains the text
    python -m tests.mutations --write             all of them, and the table
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "mutations.toml"
README = ROOT / "tests" / "README.md"
START, END = "<!-- mutations: written by python -m tests.mutations --write -->", "<!-- end of mutations -->"
PYTEST = (*("-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"), "--timeout", "200")


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


def copy_tree(target: Path) -> None:
    """The checkout's files as they are now, committed or not, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def run_tests(root: Path, tests: tuple[str, ...], own_cache: bool) -> tuple[int, str]:
    """pytest's exit status and the first test that failed. own_cache: compiled kernels go to a folder that is then removed."""
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}", "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a change within the same second and of the same length would go unseen
    with tempfile.TemporaryDirectory() as cache:
        if own_cache:
            environment["QKV_CACHE"] = cache
        done = subprocess.run([sys.executable, *PYTEST, *tests], cwd=root, env=environment, capture_output=True, text=True)
    first = re.search(r"^(?:FAILED|ERROR) (\S+::\w+)", done.stdout, re.MULTILINE)
    return done.returncode, first[1] if first else done.stdout + done.stderr


def noticed(mutation: Mutation, root: Path) -> str | None:
    """The first test below `root` that fails with the mutation, None if it survives. Raises RuntimeError if the tests did not
    run, which says nothing about them."""
    path = root / mutation.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(root), encoding="utf-8")
    try:
        status, first = run_tests(root, mutation.tests, mutation.compiles)
    finally:
        path.write_text(before, encoding="utf-8")
    if status not in (0, 1):
        raise RuntimeError(f"mutation '{mutation.breaks}': pytest ended with status {status}:\n{first}")
    return first if status else None


def table(results: dict[Mutation, str | None]) -> str:
    rows = ["| what is broken | where | the first test that notices |", "|---|---|---|"]
    for mutation, first in results.items():
        file, _, test = (first or "").partition("::")
        shown = f"`{test}` in [{Path(file).name}]({Path(file).relative_to('tests')})" if first else "**none**"
        rows.append(f"| {mutation.breaks} | `{mutation.file}` | {shown} |")
    return "\n".join(rows)


def write(results: dict[Mutation, str | None]) -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    README.write_text(f"{before}{START}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="mutations whose name or file contains it")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--write", action="store_true", help="write the table into tests/README.md")
    asked = parser.parse_args()
    chosen = [m for m in mutations() if asked.only.lower() in f"{m.breaks} {m.file}".lower()]
    if not chosen:
        parser.error(f"no mutation's name or file contains '{asked.only}'")
    if asked.write and asked.only:
        parser.error("--write needs the whole list: leave --only away")
    started, copies, done = time.monotonic(), SimpleQueue[Path](), 0
    results: dict[Mutation, str | None] = {}

    def one(mutation: Mutation) -> str | None:
        nonlocal done
        root, begun = copies.get(), time.monotonic()
        try:
            first = noticed(mutation, root)
        finally:
            copies.put(root)
        done += 1
        progress = f"[{done}/{len(chosen)}] {time.monotonic() - begun:4.0f} s  {mutation.breaks}"
        print(f"{progress}: {first or 'SURVIVED ' + ' '.join(mutation.tests)}", flush=True)
        return first

    with tempfile.TemporaryDirectory(prefix="qkv-mutations-") as folder:
        for i in range(asked.jobs):
            copy_tree(Path(folder) / str(i))
            copies.put(Path(folder) / str(i))
        try:
            for mutation in chosen:
                mutation.apply(ROOT)
            unbroken = tuple(sorted({test for m in chosen for test in m.tests}))
            print(f"the tests without any mutation: {len(unbroken)} files", flush=True)
            status, first = run_tests(Path(folder) / "0", unbroken, own_cache=False)
            if status:
                raise RuntimeError(f"the tests must pass before anything is broken, and do not: {first}")
            with ThreadPoolExecutor(asked.jobs) as pool:
                results = dict(zip(chosen, pool.map(one, chosen), strict=True))
        except (Stale, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 2
    if asked.write:
        write(results)
    survivors = sum(first is None for first in results.values())
    print(f"{len(results) - survivors} of {len(results)} mutations noticed in {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
