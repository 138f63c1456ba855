"""The command: compose the configuration, validate it, run one experiment, keep what was measured whatever happens.

    python -m experiments.run experiment=compare quantizers='[none,{name: int8}]' model=smollm2
    python -m experiments.run --help

Exit codes: 0 done · 1 the run failed · 2 the command or a setting is wrong · 130 interrupted. A user's error is one
message; a traceback is a bug. Does not know about: what any experiment measures.
"""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import report
from experiments.harness import cli
from experiments.harness.base import build
from experiments.harness.record import Record, is_finished
from qkv.errors import ConfigError, QkvError

CONF = Path(__file__).resolve().parent.parent / "conf"


_NO_PLACE = {errno.EACCES, errno.EEXIST, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
_codes: list[int] = []  # exit code of every job of this process: Hydra has no way to hand one back
_folders: list[Path] = []  # of the jobs of a sweep


def _job(config: DictConfig) -> None:
    """One run, inside the folder that Hydra chose. A user's error is printed here; bugs and Ctrl-C are raised, but in a
    sweep a bug is printed too, so that the other jobs run."""
    hydra_config = HydraConfig.get()
    folder, choice = Path(hydra_config.runtime.output_dir), hydra_config.runtime.choices.get("experiment")
    sweeping, values = hydra_config.mode == RunMode.MULTIRUN, dict[str, Any]()
    if sweeping:
        _folders.append(folder)
    try:
        values = cli.tasks_back(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
        if sweeping and is_finished(folder, values):
            print(f"finished before, skipped (delete the folder to run it again): {cli.shown(folder)}")
            _codes.append(0)
            return
        experiment, run = build(values, folder, choice)
    except (ConfigError, OmegaConfBaseException) as error:
        _codes.append(_refuse(error, 2))
        if sweeping:
            Record(folder, str(choice), values).set("error", str(error))
        else:
            cli.remove_if_empty(folder)
        return
    try:
        run.logger.start(folder, run.record.data["experiment"], values)
        with run.monitor.running():
            experiment.run(run)
        run.record.data["finished"] = True
        _codes.append(0)
    except KeyboardInterrupt:
        run.record.data["interrupted"] = True
        raise
    except QkvError as error:
        run.record.data["error"] = str(error)
        _codes.append(_refuse(error, 2 if isinstance(error, ConfigError) else 1))
    except Exception as error:
        run.record.data["error"] = f"{type(error).__name__}: {error}"
        if not sweeping:
            raise
        traceback.print_exc()
        _codes.append(1)
    finally:
        run.record.save()
        run.logger.finish(run.record.path, sorted(folder.glob("*.png")))
        sys.stderr.flush()
        print(f"record: {cli.shown(run.record.path)}", flush=True)


def _report() -> None:
    """A sweep ends in one table and one page."""
    found = report.collect(_folders)
    report.print_table(found)
    print(f"report: {cli.shown(report.write(found, _folders[0].parent / 'report.html'))}")


def _refuse(error: Exception, code: int, config: str = "config") -> int:
    print(f"error: {cli.explain(error, CONF, sys.argv[1:], config)}", file=sys.stderr)
    return code


def main(arguments: Iterable[str] | None = None, config: str = "config") -> int:
    """Run the command line; returns the exit code. Raises what is a bug. config: the file of conf/ it all starts from."""
    sys.argv[1:] = cli.tasks_apart(sys.argv[1:] if arguments is None else list(arguments))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing its own report, so that we can word it
    cli.register_resolvers(CONF)
    _codes.clear()
    _folders.clear()
    program = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config)(_job)
    before = list(logging.getLogger().handlers)
    try:
        program()
        if _folders:
            _report()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (HydraException, OmegaConfBaseException) as error:
        return _refuse(error, 2, config)
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise
        return _refuse(
            ConfigError(f"cannot write to '{error.filename}': {error.strerror}; choose another hydra.run.dir"), 2, config
        )
    finally:  # run.log ends with the run: its folder may be gone before this process is
        for handler in [h for h in logging.getLogger().handlers if h not in before]:
            logging.getLogger().removeHandler(handler)
            handler.close()
    return max(_codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
