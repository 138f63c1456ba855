"""Keeps finished tasks on disk, so that an interrupted run repeats none of them.

Takes: results of a quantizer's tasks as JSON. Gives: the same results, but only to a run with the same settings.
Does not know about: what is in a result.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import xxhash

from experiments.harness.record import plain
from qkv.errors import ConfigError


class Kept:
    """Files tasks/<quantizer>/<task>.json in the run's folder. settings: everything that results depend on. resume: the folder of
    an earlier run, whose results must all have the same settings. A run that starts again in its own folder takes the results
    that have the same settings and ignores the others."""

    def __init__(self, folder: Path, resume: str | None, settings: dict[str, Any]) -> None:
        self._folder, self._resume = folder, None if resume is None else Path(resume)
        self._identity = xxhash.xxh3_128_hexdigest(json.dumps(plain(settings), sort_keys=True).encode())

    def get(self, quantizer: str, task: str) -> dict[str, Any] | None:
        """The result, or None if there is none. Raises ConfigError if the folder to resume has one with other settings."""
        for folder in (self._folder, self._resume):
            path = _path(folder, quantizer, task) if folder else None
            if path is None or not path.is_file():
                continue
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["identity"] == self._identity:
                result: dict[str, Any] = kept["result"]
                if folder is self._resume:
                    self.put(quantizer, task, result)
                return result
            if folder is self._resume:
                raise ConfigError(f"resume: '{path}' was made with other settings or versions; start anew without resume")
        return None

    def put(self, quantizer: str, task: str, result: dict[str, Any]) -> None:
        """Write the result to its file. The file is there as a whole or not at all, even when the run dies meanwhile."""
        path = _path(self._folder, quantizer, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"identity": self._identity, "result": result}), encoding="utf-8")
        os.replace(part, path)


def _path(folder: Path, quantizer: str, task: str) -> Path:
    def safe(name: str) -> str:
        return re.sub(r"[^\w.=,()-]+", "_", name)

    return folder / "tasks" / safe(quantizer) / f"{safe(task)}.json"
