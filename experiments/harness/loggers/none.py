"""No logger: record.json is all there is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.harness.loggers.base import LOGGERS, Logger


@LOGGERS.register("none")
@dataclass
class NoLogger(Logger):
    """Nothing besides record.json."""

    def row(self, row: Mapping[str, Any]) -> None:
        pass
