"""JSON lines in the run's folder, for tools that follow a file."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.loggers.base import LOGGERS, Logger
from experiments.harness.record import flatten, plain

log = logging.getLogger(__name__)
_ROWS, _SAMPLES = "metrics.jsonl", "samples.jsonl"


@LOGGERS.register("jsonl")
@dataclass
class JsonLinesLogger(Logger):
    """In the run's folder: metrics.jsonl, one flat line per finished row, and samples.jsonl, how each came about."""

    _folder: Path | None = field(default=None, init=False, repr=False)

    def start(self, folder: Path, experiment: str, config: Mapping[str, Any]) -> None:
        self._folder = folder
        for name in (_ROWS, _SAMPLES):  # of a run that was killed here, and starts again
            (folder / name).unlink(missing_ok=True)

    def row(self, row: Mapping[str, Any]) -> None:
        self._append(_ROWS, flatten(row))

    def sample(self, label: str, values: Mapping[str, float]) -> None:
        self._append(_SAMPLES, {"label": label, **values})

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        try:
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(values)) + "\n")
        except OSError as error:
            log.warning("%s cannot be written (%s); the run goes on without it", self._folder / name, error.strerror)
            self._folder = None
