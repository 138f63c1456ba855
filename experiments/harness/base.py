"""What an experiment is: a registered dataclass with its settings and a `run`; and the settings all experiments share.

Takes: the resolved configuration as a plain mapping. Gives: validated dataclasses, before any model loads.
Does not know about: Hydra, what a particular experiment measures.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_args

from calibration.text.data import DATA, DataSource
from experiments.harness.loggers.base import LOGGERS, Logger
from experiments.harness.monitor import MetricsSettings, Monitor, Ui
from experiments.harness.record import Record
from experiments.harness.workload import Workload, read_lines
from qkv.assemble import build_policies
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError, ModelError
from qkv.models import resolve
from qkv.registry import Registry
from qkv.validate import from_mapping, suggest


@dataclass
class Run:
    """All an experiment gets: validated settings, where to write, whom to tell."""

    engine: EngineConfig
    data: DataSource
    workload: Workload
    logger: Logger
    record: Record
    folder: Path
    progress: bool  # whether the screen is a terminal that can show a progress bar
    monitor: Monitor

    def watch(self, engine: Engine) -> None:
        """This engine is the one that runs now: its counters are what is shown."""
        self.monitor.watch(engine)

    def add_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append a row, write the record, tell the logger."""
        self.record.add_row(row)
        self.logger.row(row)
        return row


@dataclass
class Experiment(ABC):
    """A registered experiment. Its fields are the keys that its YAML adds to the common ones."""

    name: ClassVar[str]
    runners: ClassVar[tuple[str, ...]] = ("model",)  # those (runner.name) with which it does what it says
    plain_workload: ClassVar[bool] = False  # whether it only takes requests that are all alike and all sent at once

    def check(self) -> None:
        """Validate what needs policies to be registered. Called before anything is loaded. Raises ConfigError."""

    @abstractmethod
    def run(self, run: Run) -> None:
        """Measure, add rows to the record as they are finished, print a table."""


EXPERIMENTS: Registry[Experiment] = Registry("experiment", Experiment, "experiments.studies")


def build(config: Mapping[str, Any], folder: Path, choice: str | None = None) -> tuple[Experiment, Run]:
    """Validate the whole configuration (plain mapping, resolved) and open the record. Raises ConfigError.

    choice: name under which the record files it, e.g. `demo`, whose code is `compare`.
    """
    values = dict(config)
    name = values.pop("experiment", None)
    if not name or not isinstance(name, str):
        raise ConfigError(f"choose what to do: experiment=NAME. Allowed: {', '.join(EXPERIMENTS.names())} (or see --help)")
    engine_keys = {f.name for f in fields(EngineConfig)}
    parts = {key: values.pop(key, {}) for key in ("data", "workload", "logger")}
    ui = values.pop("ui", "none")
    if ui not in get_args(Ui):
        raise ConfigError(f"ui: '{ui}' is not allowed; {suggest(str(ui), get_args(Ui))}")
    monitor = Monitor(from_mapping(MetricsSettings, values.pop("metrics", {}), "metrics"), ui)
    engine_values = {key: values.pop(key) for key in list(values) if key in engine_keys}

    engine = from_mapping(EngineConfig, engine_values, "config")
    build_policies(engine)
    try:
        resolve(engine.model)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    if isinstance(engine.scales, str) and not Path(engine.scales).expanduser().is_file():
        raise ConfigError(f"scales: '{engine.scales}' is not a file; give a scale file, or scales=null to calibrate in memory")

    cls = EXPERIMENTS.get(name)
    if engine.runner.name not in cls.runners:
        if engine.runner.name == "model":
            raise ConfigError(f"runner: experiment={name} is about the simulator; use runner=simulated")
        able = ", ".join(n for n in EXPERIMENTS.names() if "simulated" in EXPERIMENTS.get(n).runners)
        raise ConfigError(
            f"runner=simulated: experiment={name} needs a real model, and a simulation has no weights, text or logits; use "
            f"runner=default, or one of the experiments that can be simulated: {able}"
        )
    own = {f.name for f in fields(cls) if f.init}
    for key in values:
        if key not in own:
            raise ConfigError(f"unknown key '{key}'; {suggest(key, own | engine_keys | set(parts) | {'metrics', 'ui'})}")
    experiment = from_mapping(cls, values, f"experiment {name}")
    data, workload = DATA.build(parts["data"]), from_mapping(Workload, parts["workload"], "workload")
    logger = LOGGERS.build(parts["logger"])
    if cls.plain_workload and not workload.plain:
        raise ConfigError(
            f"workload: experiment={name} sends requests that are all alike, all at once: use workload=default, quick or long; "
            "for uneven lengths, arrivals, shared prefixes or conversations use experiment=throughput"
        )
    if workload.file is not None:
        read_lines(workload.file)  # a bad line is reported before anything is loaded
    experiment.check()
    record = Record(folder, experiment=choice or name, config=config, timed=engine.runner.name != "simulated")
    progress = sys.stderr.isatty() and ui != "live"
    return experiment, Run(engine, data, workload, logger, record, folder, progress, monitor)
