"""Finds lm-eval's tasks by name, ours in conf/tasks and lm-eval's own, and says why where one cannot be loaded.

Takes: names of tasks, or of lm-eval's groups and tags. Gives: lm-eval's task objects. Does not know about: models, scores.
"""

import difflib
import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.errors import ConfigError, QkvError
from qkv.models.hub import unreachable

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "tasks"
_LOCAL = ("json", "csv", "text", "parquet", "arrow", "pandas", "xml")  # builders of `datasets` that read files


def require_lm_eval() -> None:
    """Raise ConfigError unless lm-eval is installed. Its notices about defaults and overrides are kept off the screen."""
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"lm-eval is not installed ({error}): pip install 'qkv[eval]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def manager(names: Sequence[str], folders: Sequence[str | Path], metadata: Mapping[str, Any]) -> Any:
    """A TaskManager of lm-eval that knows `names`. It reads only `folders` and conf/tasks where that is enough, since lm-eval's
    own 10,000 YAML files take long to read. Raises ConfigError for a name that is in none of them, or a folder that is none."""
    from lm_eval.tasks import TaskManager

    paths = [str(FOLDER), *map(str, folders)]
    for path in paths:
        if not os.path.isdir(os.path.expanduser(path)):
            raise ConfigError(f"task_folders: '{path}' is not a folder")
    for defaults in (False, True):
        found = TaskManager(include_path=paths, include_defaults=defaults, metadata=dict(metadata))
        missing = [name for name in names if name not in found.all_tasks]
        if not missing:
            return found
    close = difflib.get_close_matches(missing[0], found.all_tasks, n=3)
    hint = f"did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
    own = ", ".join(sorted(path.stem for path in FOLDER.glob("*.yaml")))
    raise ConfigError(f"unknown task '{missing[0]}'; {hint}Without a network: {own}. All of them: lm-eval ls tasks")


def load(manager: Any, names: Sequence[str]) -> dict[str, Any]:
    """The tasks that `names` stand for, by name; those of a group one by one. Raises ConfigError, naming the data set, for a task
    that needs a network where there is none."""
    remote = {name: path for name in names if (path := _remote(manager, name))}
    if remote and unreachable():
        _go_offline()
    tasks: dict[str, Any] = {}
    for name in names:
        began = time.perf_counter()
        try:
            tasks |= manager.load([name])["tasks"]
        except QkvError:
            raise
        except Exception as error:  # datasets, hub and YAML errors share no base class
            raise ConfigError(_why(name, remote.get(name), error)) from error
        logging.getLogger(__name__).info("task %s: loaded in %.1f s", name, time.perf_counter() - began)
    return tasks


def _remote(manager: Any, name: str) -> str | None:
    """The hub data set that a task, or a member of a group, reads according to its YAML; None if it reads none."""
    entry = manager.task_index.get(name)
    config = (entry.cfg or {}) if entry else {}
    members = [m if isinstance(m, str) else m.get("task") for m in config.get("task", []) if isinstance(config.get("task"), list)]
    members += sorted(entry.tags) if entry and entry.yaml_path is None else []
    for member in members:
        if isinstance(member, str) and member != name and (path := _remote(manager, member)):
            return path
    path = config.get("dataset_path")
    local = path is None or path in _LOCAL or "custom_dataset" in config or Path(path).exists()
    return None if local else str(path)


@functools.lru_cache
def _go_offline() -> None:
    """Make data sets come from the local cache or fail at once, not after minutes of retries."""
    import datasets
    import huggingface_hub

    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _why(name: str, path: str | None, error: Exception) -> str:
    """The error message for a task that cannot be loaded. path: the hub data set that it reads."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if path is not None and unreachable():
        return (
            f"task '{name}' needs the data set '{path}' from the Hugging Face hub, which cannot be reached, and it is not in the "
            f"local cache. Tasks of {FOLDER.parent.name}/{FOLDER.name} need no network"
        )
    return f"task '{name}' cannot be loaded: {first}"
