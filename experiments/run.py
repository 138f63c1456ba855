"""The command: compose the configuration, validate it, run one experiment, keep what was measured whatever happens.

    python -m experiments.run experiment=compare quantizers='[none,{name: int8}]' model=smollm2
    python -m experiments.run --help

Exit codes: 0 done · 1 the run failed · 2 the command or a setting is wrong, and nothing is left of it · 130 interrupted.
A user's error is one message; a traceback is a bug. Does not know about: what any experiment measures.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import report
from experiments.harness import cli, folders, screen
from experiments.harness.base import Experiment, Run, build
from experiments.harness.record import Record, is_finished
from qkv.errors import ConfigError, QkvError

CONF = Path(__file__).resolve().parent.parent / "conf"


@dataclass
class _Command:
    """One call of main(). codes: the exit code of every job, which Hydra has no way to hand back. sweep: its jobs' folders."""

    config: str
    place: str  # the setting of where it writes
    claims: folders.Claims = field(default_factory=folders.Claims)
    codes: list[int] = field(default_factory=list)
    sweep: list[Path] = field(default_factory=list)
    began: bool = False  # whether the settings were composed and a job has been called
    elsewhere: bool = False  # whether another process is at this very sweep

    def job(self, config: DictConfig) -> None:
        """One run, inside the folder that Hydra chose. A user's error is printed here; bugs and Ctrl-C are raised, but in a
        sweep a bug is printed too, so that the other jobs run."""
        self.began = True
        hydra_config = HydraConfig.get()
        folder, choice = Path(hydra_config.runtime.output_dir), hydra_config.runtime.choices.get("experiment")
        sweeping, values = hydra_config.mode == RunMode.MULTIRUN, dict[str, Any]()
        if sweeping and not self._locked(folder.parent):
            return
        try:
            if sweeping:
                self.sweep.append(folder)
            values = cli.tasks_back(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
            if sweeping and is_finished(folder, values):
                print(f"finished before, skipped (delete the folder to run it again): {cli.shown(folder)}")
                self.codes.append(0)
                return
            experiment, run = build(values, folder, choice)
        except (ConfigError, OmegaConfBaseException) as error:
            self.codes.append(self.refuse(error, 2))
            if sweeping:
                Record(folder, str(choice), values).set("error", str(error))
            else:
                folders.remove_if_empty(folder)
            return
        except OSError as error:
            message = folders.no_place(error, self.place)
            if message is None:
                raise
            self.codes.append(self.refuse(ConfigError(message), 2))
            folders.remove_if_empty(folder)
            return
        self._run(experiment, run, values, sweeping)

    def _locked(self, sweep: Path) -> bool:
        """Whether the sweep's folder is this process's alone. If not, that is said once."""
        if not self.sweep and not self.elsewhere:
            try:
                self.claims.lock(sweep)
            except ConfigError as error:
                self.elsewhere = True
                self.codes.append(self.refuse(error, 2))
        return not self.elsewhere

    def _run(self, experiment: Experiment, run: Run, values: dict[str, Any], sweeping: bool) -> None:
        data = run.record.data
        try:
            run.logger.start(run.folder, data["experiment"], values)
            with run.monitor.running():
                experiment.run(run)
            data["finished"] = True
            self.codes.append(0)
        except KeyboardInterrupt:
            data["interrupted"] = True
            raise
        except QkvError as error:
            data["error"] = str(error)
            wrong = isinstance(error, ConfigError) and not data["rows"]
            self.codes.append(self.refuse(error, 2 if wrong else 1))
        except Exception as error:
            full = folders.no_place(error, self.place) if isinstance(error, OSError) else None
            data["error"] = full or f"{type(error).__name__}: {error}"
            if full:
                self.codes.append(self.refuse(ConfigError(full), 1))
            elif sweeping:
                traceback.print_exc()
                self.codes.append(1)
            else:
                raise
        finally:
            refused = self.codes[-1:] == [2] and not sweeping
            if not refused:
                self._save(run)
            run.logger.finish(run.record.path, sorted(run.folder.glob("*.png")))
            sys.stderr.flush()
            if refused:  # what only the loaded model or data showed to be wrong leaves nothing behind either
                folders.discard(run.folder)
            else:
                print(f"record: {cli.shown(run.record.path)}", flush=True)

    def _save(self, run: Run) -> None:
        try:
            run.record.save()
        except OSError as error:
            print(f"WARNING: the record is as of its last row: {folders.no_place(error, self.place) or error}", file=sys.stderr)

    def finish(self) -> None:
        """A sweep ends in one table and one page; where every job was refused, in nothing."""
        if not self.sweep:
            return
        if all(code == 2 for code in self.codes):
            for folder in self.sweep:
                folders.discard(folder)
            self.claims.release()
            folders.discard(self.sweep[0].parent)
            return
        found = report.collect(self.sweep)
        report.print_table(found)
        print(f"report: {cli.shown(report.write(found, self.sweep[0].parent / 'report.html'))}")

    def refuse(self, error: Exception, code: int) -> int:
        print(f"error: {cli.explain(error, CONF, sys.argv[1:], self.config)}", file=sys.stderr)
        return code


def main(arguments: Iterable[str] | None = None, config: str = "config") -> int:
    """Run the command line; returns the exit code. Raises what is a bug. config: the file of conf/ it all starts from."""
    with screen.prepared(), _logs_closed():
        words = sys.argv[1:] if arguments is None else list(arguments)
        command = _Command(config, "hydra.sweep.dir" if {"-m", "--multirun"} & set(words) else "hydra.run.dir")
        try:
            return _main(command, words)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except (HydraException, OmegaConfBaseException) as error:  # some of Hydra's are OSErrors too
            return command.refuse(error, 2)
        except OSError as error:
            message = folders.no_place(error, command.place)
            if message is None:
                raise
            return command.refuse(ConfigError(message), 1 if command.codes else 2)
        except QkvError as error:
            return command.refuse(error, 1 if command.began else 2)
        except Exception as error:
            if command.began:
                raise
            return command.refuse(error, 2)  # of composing the settings: Hydra raises whatever comes up
        finally:
            command.claims.release()
            if not command.began:
                command.claims.discard()


def _main(command: _Command, arguments: list[str]) -> int:
    sys.argv[1:] = cli.tasks_apart(cli.flags_first(arguments))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing its own report, so that we can word it
    cli.register_resolvers(CONF, command.claims)
    hydra.main(version_base="1.3", config_path=str(CONF), config_name=command.config)(command.job)()
    command.finish()
    return max(command.codes, default=0)


@contextlib.contextmanager
def _logs_closed() -> Iterator[None]:
    """The log of a run ends with the run, since its folder may be gone before this process is; what was there comes back."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in [h for h in root.handlers if h not in before]:
            handler.close()
        root.handlers[:] = before


if __name__ == "__main__":
    sys.exit(main())
