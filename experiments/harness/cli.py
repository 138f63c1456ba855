"""Wording of the command line: --help from what is in conf/, and one clear message for every mistake.

Takes: the configuration folder, exceptions of Hydra and omegaconf. Gives: text.
Does not know about: experiments, engines.
"""

import contextlib
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from experiments.harness.folders import Claims
from qkv.errors import ConfigError
from qkv.validate import suggest

_PACKAGE_HEADER = "# @package"


def register_resolvers(conf: Path, claims: Claims | None = None) -> None:
    """${qkv.experiments:} and ${qkv.groups:}, used by the template of --help (conf/hydra/help/qkv.yaml); ${qkv.claim:FOLDER} and
    ${qkv.sweep:EXPERIMENT}, the folders of conf/config.yaml. claims: who makes and remembers them."""
    claims = claims or Claims()
    OmegaConf.register_new_resolver("qkv.experiments", lambda: _experiments(conf), replace=True)
    OmegaConf.register_new_resolver("qkv.claim", claims.folder, replace=True)
    OmegaConf.register_new_resolver("qkv.sweep", lambda experiment: claims.sweep(_sweep(experiment)), replace=True)
    OmegaConf.register_new_resolver("qkv.groups", lambda: _groups(conf), replace=True)


def _sweep(experiment: str | None) -> str:
    """Names a sweep by its command, so that the same command finds the jobs that it finished before."""
    words = sorted(a for a in sys.argv[1:] if not a.startswith(("-", "hydra.")))
    return f"{experiment or 'several'}/sweep_{hashlib.sha256(chr(10).join(words).encode()).hexdigest()[:8]}"


def flags_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with -m, wherever it stands, before the settings: Hydra takes what follows it there for nothing it knows.
    Raises ConfigError for flags that nobody knows."""
    sweep = ("-m", "--multirun")
    ordered = [*(a for a in arguments if a in sweep), *(a for a in arguments if a not in sweep)]
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; write key=value settings, and see --help and --hydra-help")

    setattr(parser, "error", refuse)  # noqa: B010 - argparse prints its usage and exits
    parser.parse_args(ordered)
    return ordered


def tasks_apart(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `tasks=...` under a name that tasks_back() undoes: conf/tasks holds lm-eval's files, but Hydra takes
    every folder of conf/ for a group, and `tasks=[a,b]` for a choice of its options."""
    return [f"+task.names={a.removeprefix('tasks=')}" if a.startswith("tasks=") else a for a in arguments]


def tasks_back(values: dict[str, Any]) -> dict[str, Any]:
    """The composed settings, with `tasks` where the command line said so."""
    task = values.get("task")
    if isinstance(task, dict) and "names" in task:
        values["tasks"] = task.pop("names")
        if not task:
            del values["task"]
    return values


def header(file: Path) -> tuple[str, str]:
    """The two comment lines every YAML of conf/ opens with: the exact command, and what it shows."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith(_PACKAGE_HEADER)]
    command, shows = (line.removeprefix("# ") if line.startswith("# ") else "" for line in [*lines, "", ""][:2])
    return command, shows


def groups(conf: Path) -> dict[str, list[str]]:
    """Group name -> option names."""
    folders = sorted(p for p in conf.iterdir() if p.is_dir() and p.name not in ("hydra", "tasks"))
    return {folder.name: sorted(f.stem for f in folder.glob("*.yaml")) for folder in folders}


def _experiments(conf: Path) -> str:
    files = sorted((conf / "experiment").glob("*.yaml"))
    return "\n".join(f"  {file.stem:<16} {header(file)[1]}" for file in files).replace("$", "$$")


def _groups(conf: Path) -> str:
    return "\n".join(f"  {group:<16} {', '.join(options)}" for group, options in groups(conf).items())


def shown(path: Path) -> str:
    """A path as short as it can be copied: relative to the working folder where it lies below it."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def explain(error: Exception, conf: Path, arguments: Sequence[str], config: str = "config") -> str:
    """One message for a person: the offending word, what is allowed, what to do. config: the file that was composed."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read '{error.override}'. Write key=value; quote lists for the shell, e.g. quantizers='[none,{{name: int8}}]'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"unknown {group} '{option}'; {suggest(option, error.options)}"
    if "override must be a string or a list" in text:  # of a group, and Hydra does not say which
        for group, _, value in (argument.partition("=") for argument in arguments):
            options = groups(conf).get(group, [])
            if group[:1].isalpha() and "." not in group and set(value.split(",")) - set(options):
                return f"{group}={value}: '{value}' is no option of {group}; {suggest(value, options)}"
    if first.startswith("Ambiguous value for argument"):
        given = first.removeprefix("Ambiguous value for argument ")
        return f"{given} has several values: a sweep over them takes -m; a list is [a,b]"
    if isinstance(error, MissingMandatoryValue):
        key = error.full_key or error.key
        return f"{key} is needed: add {key}=..."
    found = re.search(r"Could not (?:override|append|delete)[^']*'([^']+)'", text)
    if isinstance(error, ConfigCompositionException) and found:
        return _unknown_key(found[1], conf, arguments, config)
    return first if "\n" in text or not text else text


def _unknown_key(key: str, conf: Path, arguments: Sequence[str], config: str) -> str:
    *parents, last = key.split(".")
    node: object = _composed(conf, arguments, config)
    for i, parent in enumerate(parents):
        inner = node.get(parent) if isinstance(node, DictConfig) else None
        if not isinstance(inner, DictConfig):
            if isinstance(node, DictConfig) and parent in node:
                return f"unknown key '{key}': {'.'.join(parents[: i + 1])} is a value and has no keys"
            last = parent  # the first part that does not exist is the one to correct
            break
        node = inner
    allowed = [str(k) for k in node] if isinstance(node, DictConfig) else []
    if node is None or not parents:
        allowed = sorted({*allowed, *groups(conf)})
    return f"unknown key '{key}'; {suggest(last, allowed)}"


def _composed(conf: Path, arguments: Sequence[str], config: str) -> DictConfig | None:
    """The configuration with the command line's choices of groups but not its values, for its keys."""
    known = groups(conf)
    choices = [a for a in arguments if a.partition("=")[0] in known and a.partition("=")[2] in known[a.partition("=")[0]]]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            return compose(config, choices)
    except ConfigCompositionException:
        return None
