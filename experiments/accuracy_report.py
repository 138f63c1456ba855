"""Shows the tables of a finished experiment=accuracy again, and writes its page anew.

    python -m experiments.accuracy_report outputs/accuracy/2026-01-31_12-00-00 [out=accuracy.html]

Takes: a run's record.json and flips.json. Gives: tables, a page. Does not know about: how anything was measured.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness.page import command
from experiments.lm.findings import print_tables, tables, write
from qkv.errors import ConfigError


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run's record and flips. Raises ConfigError."""
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        flips = folder / "flips.json"
        listed = json.loads(flips.read_text(encoding="utf-8")) if flips.is_file() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{folder}' is not the folder of a run: {error}") from None
    if not any("tasks" in row.get("accuracy", {}) for row in record.get("rows", [])):
        raise ConfigError(f"'{folder}' holds a run of experiment={record.get('experiment')}, not of experiment=accuracy")
    return record, listed


def _make(folders: list[Path], settings: dict[str, str]) -> None:
    if len(folders) != 1:
        raise ConfigError("say which run: python -m experiments.accuracy_report outputs/accuracy/... [out=file]")
    record, flips = read(folders[0])
    print_tables(tables(record, flips))
    print(f"report: {write(record, flips, Path(settings.get('out', folders[0] / 'accuracy.html')))}")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    return command(arguments, ("out",), _make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
