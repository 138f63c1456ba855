"""Finished tasks on disk, so that an interrupted run repeats none of them.

Takes: results of a quantizer's tasks as JSON. Gives: them back, to a run of the same settings only.
Does not know about: what is in them.
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
    """tasks/<quantizer>/<task>.json in the run's folder. settings: everything that results depend on. resume: the folder of an
    earlier run, whose results must be of the same settings; a run that starts again in its own folder takes those that are."""

    def __init__(self, folder: Path, resume: str | None, settings: dict[str, Any]) -> None:
        self._folder, self._resume = folder, None if resume is None else Path(resume)
        self._identity = xxhash.xxh3_128_hexdigest(json.dumps(plain(settings), sort_keys=True).encode())

    def get(self, quantizer: str, task: str) -> dict[str, Any] | None:
        """The result, if it is there. Raises ConfigError for one of other settings in the folder to resume."""
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
        """Whole or not at all."""
        path = _path(self._folder, quantizer, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"identity": self._identity, "result": result}), encoding="utf-8")
        os.replace(part, path)


def _path(folder: Path, quantizer: str, task: str) -> Path:
    def safe(name: str) -> str:
        return re.sub(r"[^\w.=,()-]+", "_", name)

    return folder / "tasks" / safe(quantizer) / f"{safe(task)}.json"
