"""Every YAML of conf/ composes, validates, opens with its command, and mirrors its dataclass: stem = name, fields = defaults."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from calibration.text.data import DATA
from experiments.harness import cli
from experiments.harness.base import EXPERIMENTS, build
from experiments.harness.loggers.base import LOGGERS
from experiments.harness.workload import Workload
from qkv.config import (
    SHAPE_FIELDS,
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from qkv.models.gguf import PACKAGES
from qkv.models.shapes import RANDOM_SHAPES
from qkv.policies.allocator.base import ALLOCATORS
from qkv.policies.evictor.base import EVICTORS
from qkv.policies.preemptor.base import PREEMPTORS
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.registry import Registry
from qkv.validate import from_mapping

CONF = Path(__file__).parents[2] / "conf"
GROUPS = cli.groups(CONF)
FILES = sorted(CONF.rglob("*.yaml"))  # those of tasks/ are lm-eval's, and no group
REGISTRIES: dict[str, Registry[Any]] = {
    "quantizer": QUANTIZERS,
    "allocator": ALLOCATORS,
    "evictor": EVICTORS,
    "preemptor": PREEMPTORS,
    "data": DATA,
    "logger": LOGGERS,
}
SCHEMAS = {
    "attention": AttentionConfig,
    "cache": CacheConfig,
    "device": DeviceConfig,
    "runner": RunnerConfig,
    "scheduler": SchedulerConfig,
    "workload": Workload,
}


@pytest.fixture(scope="module", autouse=True)
def _resolvers() -> None:
    cli.register_resolvers(CONF)


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        values = OmegaConf.to_container(compose("config", list(overrides)), resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def read(group: str, option: str) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def test_the_groups_are_those_of_the_design() -> None:
    named = "model quantizer allocator evictor preemptor attention scheduler cache runner device data workload logger experiment"
    assert set(GROUPS) == set(named.split())


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONF)))
def test_every_file_opens_with_its_command_and_what_it_shows(file: Path) -> None:
    command, shows = cli.header(file)
    assert command.startswith(("python -m experiments.run", "python -m calibration.", "make demo"))
    assert shows
    if file.parent.parent == CONF and file.parent.name != "hydra" and not command.startswith("python -m calibration."):
        assert f"{file.parent.name}" in command or file.stem in command
    assert "_target_" not in file.read_text(encoding="utf-8")


OPTIONS = [(f"{group}={option}", CONF / group / f"{option}.yaml") for group, options in GROUPS.items() for option in options]


@pytest.mark.parametrize("choice", [choice for choice, file in OPTIONS if choice not in cli.header(file)[0].split()])
def test_an_option_that_its_header_does_not_choose_composes_and_validates(choice: str, tmp_path: Path) -> None:
    """The others are composed by tests/reports/test_documented_commands.py, as their headers show them."""
    _, run = build(composed(choice, "experiment=compare"), tmp_path / "out")
    assert run.record.path.exists()


@pytest.mark.parametrize("group", REGISTRIES)
def test_one_file_per_registered_name_with_every_field_at_its_default(group: str) -> None:
    registry = REGISTRIES[group]
    assert GROUPS[group] == registry.names()
    for option in GROUPS[group]:
        values = read(group, option)
        assert values.pop("name") == option
        fields = [f for f in dataclasses.fields(registry.get(option)) if f.init]
        expected = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        expected |= {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
        expected = {f.name: expected.get(f.name, "???") for f in fields}
        assert values == expected, f"conf/{group}/{option}.yaml differs from the dataclass's defaults"


@pytest.mark.parametrize("group", SCHEMAS)
def test_settings_files_state_every_field(group: str) -> None:
    schema = SCHEMAS[group]
    for option in GROUPS[group]:
        values = read(group, option)
        assert set(values) == {f.name for f in dataclasses.fields(schema)}
        if "???" not in values.values():
            from_mapping(schema, values, group)
    if group != "device":  # its files are measurements or data sheets, and none is a default
        first = {"attention": "auto"}.get(group, "default")
        assert from_mapping(schema, read(group, first), group) == schema()


def test_models_are_those_that_can_be_loaded_by_name() -> None:
    assert set(GROUPS["model"]) == {*PACKAGES, *RANDOM_SHAPES, "hub", "path", "gguf", "shape"}
    for option in GROUPS["model"]:
        values = read("model", option)
        assert values["name"] == option
        own = set() if option == "shape" else set(SHAPE_FIELDS)
        assert set(values) == {f.name for f in dataclasses.fields(ModelConfig)} - own


def test_experiments_are_registered_and_their_files_state_every_field() -> None:
    assert set(EXPERIMENTS.names()) <= set(GROUPS["experiment"])
    for name in EXPERIMENTS.names():
        values = read("experiment", name)
        assert values.pop("experiment") == name
        assert {f.name for f in dataclasses.fields(EXPERIMENTS.get(name)) if f.init} <= set(values)


def test_the_defaults_list_reaches_every_engine_setting() -> None:
    values = composed("experiment=compare")
    assert {f.name for f in dataclasses.fields(EngineConfig)} <= set(values)
