"""Weights & Biases. The package is imported only when this logger is chosen."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiments.harness.loggers.base import LOGGERS, Logger
from experiments.harness.record import flatten, plain

log = logging.getLogger(__name__)


@LOGGERS.register("wandb")
@dataclass
class WandbLogger(Logger):
    """Weights & Biases: one step per row, curves over each row's time, a table of all rows, plots as images, record.json and
    scale files as artifacts.

    mode offline writes to the run's folder; `wandb sync` uploads it later.
    """

    project: str = "qkv"
    entity: str | None = None
    mode: Literal["offline", "online", "disabled"] = "offline"
    group: str | None = None
    _run: Any = field(default=None, init=False, repr=False)
    _rows: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    _curves: set[str] = field(default_factory=set, init=False, repr=False)
    _scales: list[Path] = field(default_factory=list, init=False, repr=False)

    def start(self, folder: Path, experiment: str, config: Mapping[str, Any]) -> None:
        try:
            os.environ.setdefault("WANDB_SILENT", "true")
            import wandb

            if self.mode == "online" and not _logged_in(wandb):
                raise PermissionError("nobody is logged in (wandb login, or WANDB_API_KEY=...; or logger.mode=offline)")
            self._scales = [Path(os.path.expanduser(str(config["scales"])))] if config.get("scales") else []
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                mode=self.mode,
                group=self.group,
                job_type=experiment,
                dir=str(folder),
                config=plain(config),
            )
        except ImportError:
            log.warning("logger=wandb: the package 'wandb' is not installed (pip install wandb); the run goes on without it")
        except Exception as error:  # no login, no network, a bad entity: wandb raises many kinds
            self._give_up(error)

    def row(self, row: Mapping[str, Any]) -> None:
        self._rows.append(plain(flatten(row)))
        self._try(lambda: self._run.log({k: v for k, v in self._rows[-1].items() if not isinstance(v, list)}))

    def sample(self, label: str, values: Mapping[str, float]) -> None:
        self._try(lambda: self._sample(label, values))

    def _sample(self, label: str, values: Mapping[str, float]) -> None:
        if label not in self._curves:
            self._curves.add(label)
            self._run.define_metric(f"{label}/*", step_metric=f"{label}/seconds")
        self._run.log({f"{label}/{key}": value for key, value in values.items()})

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        def log_table() -> None:
            import wandb

            self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        self._try(log_table)

    def lm_eval(self, results: Mapping[str, Any]) -> None:
        """Through lm-eval's own logger, which attaches to the run that is open."""

        def log_results() -> None:
            from lm_eval.loggers import WandbLogger as LmEvalLogger

            logger = LmEvalLogger()
            logger.post_init(dict(results))
            logger.log_eval_result()
            logger.log_eval_samples(results["samples"])

        self._try(log_results)

    def finish(self, record: Path, plots: list[Path]) -> None:
        self._try(lambda: self._finish(record, plots))

    def _finish(self, record: Path, plots: list[Path]) -> None:
        import wandb

        columns: list[str | int] = list(dict.fromkeys(key for row in self._rows for key in row))
        cells = [[None if (value := row.get(str(c))) is None else str(value) for c in columns] for row in self._rows]
        self._run.log({"rows": wandb.Table(columns=columns, data=cells)})
        self._run.log({plot.stem: wandb.Image(str(plot)) for plot in plots})
        artifact = wandb.Artifact(f"record-{self._run.id}", type="record")
        artifact.add_file(str(record))
        self._run.log_artifact(artifact)
        if files := [*self._scales, *record.parent.glob("*.safetensors")]:
            scales = wandb.Artifact(f"scales-{self._run.id}", type="scales")
            for file in files:
                scales.add_file(str(file))
            self._run.log_artifact(scales)
        self._run.finish()

    def _try(self, action: Any) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:  # a failing sink must not cost the measurements
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        reason = str(error).strip().splitlines()
        log.warning("logger=wandb: %s; the run goes on without it", reason[0] if reason else type(error).__name__)


def _logged_in(wandb: Any) -> bool:
    """Asked before init, which would wait for somebody to type a key."""
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # wandb before 0.31
        return bool(wandb.api.api_key)
