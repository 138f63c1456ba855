"""record.json: what was run, on what, and what came out. Written after every row, atomically.

Takes: configuration and rows as plain mappings. Gives: one JSON file per run; experiments/README.md explains every key.
Does not know about: what the numbers mean, loggers, tables.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
_ROOT = Path(__file__).resolve().parents[2]


class Record:
    """The record of one run, in memory and on disk. What writes it raises OSError, naming it, where it cannot be written."""

    def __init__(self, folder: Path, experiment: str, config: Mapping[str, Any], timed: bool = True) -> None:
        """timed: False leaves out when it ran and for how long: a simulation's record depends on nothing but its settings."""
        self.path = folder / "record.json"
        self._start = time.perf_counter()
        times = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "wall_s": 0.0}
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "experiment": experiment,
            **(times if timed else {}),
            "host": host(),
            "versions": versions(),
            **({"git": state} if (state := git_state()) else {}),
            "config": dict(config),
            "rows": [],
        }
        self.save()

    def set(self, key: str, value: Any) -> None:
        """Set one top-level key and write."""
        self.data[key] = value
        self.save()

    def add_row(self, row: dict[str, Any]) -> None:
        """Append a row and write. The row may be filled further; save() writes it again."""
        self.data["rows"].append(row)
        self.save()

    def save(self) -> None:
        """Write to a temporary file and rename it, so that a reader or a crash never sees half a record."""
        if "wall_s" in self.data:
            self.data["wall_s"] = round(time.perf_counter() - self._start, 3)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".json.tmp")
        try:
            temporary.write_text(json.dumps(plain(self.data), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def is_finished(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the folder holds the record of a run of these settings, on this commit, that ended well."""
    try:
        old = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return old.get("finished") is True and old.get("config") == plain(dict(config)) and old.get("git") == git_state()


def plain(value: Any) -> Any:
    """JSON types only: paths, dtypes and the like become text; NaN and infinity become text too, so they stay visible."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def host() -> dict[str, Any]:
    """cpu (model name), cores usable by this process, memory_bytes, accelerator (name or null)."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # not by psutil: experiments.gpu_check writes records too, on machines without it
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": name, "cores": cores, "memory_bytes": memory, "accelerator": accelerator}


def versions() -> dict[str, str]:
    """Versions of what decides the numbers; packages that are not installed are absent."""
    found = {"python": platform.python_version()}
    for package in ("qkv", "torch", "transformers", "triton", "hydra-core", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_state() -> dict[str, Any] | None:
    """commit and whether tracked files differ from it; None outside a git clone or without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != _ROOT:
            return None  # unpacked inside some other repository
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'memory': {'pool_bytes': 1}} -> {'memory/pool_bytes': 1}."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out
