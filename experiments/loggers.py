"""Where results go besides record.json. A logger that fails says so once and never stops the run.

Takes: configuration, rows, plots, the record's path. Gives: nothing back.
Does not know about: how rows are measured. wandb is imported only when chosen.
"""

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from experiments.record import plain
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


LOGGERS: Registry[Logger] = Registry("logger", Logger, "experiments")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'memory': {'pool_bytes': 1}} -> {'memory/pool_bytes': 1}."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


@LOGGERS.register("none")
@dataclass
class NoLogger(Logger):
    """Nothing besides record.json."""

    def row(self, row: Mapping[str, Any]) -> None:
        pass


@LOGGERS.register("jsonl")
@dataclass
class JsonLinesLogger(Logger):
    """In the run's folder: metrics.jsonl, one flat line per finished row, and samples.jsonl, how each came about."""

    _folder: Path | None = field(default=None, init=False, repr=False)

    def start(self, folder: Path, experiment: str, config: Mapping[str, Any]) -> None:
        self._folder = folder

    def row(self, row: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", flatten(row))

    def sample(self, label: str, values: Mapping[str, float]) -> None:
        self._append("samples.jsonl", {"label": label, **values})

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        if self._folder is not None:
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(values)) + "\n")


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
            self._scales = [Path(str(config["scales"])).expanduser()] if config.get("scales") else []
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
