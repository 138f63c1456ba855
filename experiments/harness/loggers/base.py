"""Where results go besides record.json. A logger that fails says so once and never stops the run.

Takes: configuration, rows, plots, the record's path. Gives: nothing back.
Does not know about: how rows are measured. wandb is imported only when chosen.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qkv.registry import Registry

log = logging.getLogger(__name__)


@dataclass
class Logger(ABC):
    """A sink of results. Registered dataclass = settings = YAML schema."""

    name: ClassVar[str]

    def start(self, folder: Path, experiment: str, config: Mapping[str, Any]) -> None:
        """Called once, before anything is measured."""

    @abstractmethod
    def row(self, row: Mapping[str, Any]) -> None:
        """A finished row of the record."""

    def sample(self, label: str, values: Mapping[str, float]) -> None:
        """How the run of row `label` stands after values["seconds"], about a hundred times while it is served."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table for eyes that is more than the rows."""

    def lm_eval(self, results: Mapping[str, Any]) -> None:
        """Results and samples as lm-eval's simple_evaluate returns them."""

    def finish(self, record: Path, plots: list[Path]) -> None:
        """Called once, also after an error or an interruption."""


LOGGERS: Registry[Logger] = Registry("logger", Logger, "experiments.harness.loggers")
