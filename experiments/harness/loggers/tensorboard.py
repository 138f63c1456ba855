"""TensorBoard. The package is imported only when this logger is chosen."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.loggers.base import LOGGERS, Logger
from experiments.harness.record import flatten, plain

log = logging.getLogger(__name__)


@LOGGERS.register("tensorboard")
@dataclass
class TensorboardLogger(Logger):
    """TensorBoard: every figure of every row as a scalar, the row's number as the step; samples with the milliseconds of the
    row's time as the step; plots are not copied."""

    _writer: Any = field(default=None, init=False, repr=False)
    _step: int = field(default=0, init=False, repr=False)

    def start(self, folder: Path, experiment: str, config: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.warning("logger=tensorboard: not installed (pip install tensorboard); the run goes on without it")
            return
        self._writer = SummaryWriter(str(folder))
        self._writer.add_text("config", f"```\n{json.dumps(plain(config), indent=2)}\n```")

    def row(self, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        for key, value in flatten(row).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(key, value, self._step)
        self._writer.flush()
        self._step += 1

    def sample(self, label: str, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for key, value in values.items():
                self._writer.add_scalar(f"{label}/{key}", value, round(1e3 * values["seconds"]))

    def finish(self, record: Path, plots: list[Path]) -> None:
        if self._writer is not None:
            self._writer.close()
