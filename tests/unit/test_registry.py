"""The registry: discovery, did-you-mean, collisions, settings of the built class."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import ConfigError
from qkv.registry import Registry, import_policy_modules

POLICY = """
from dataclasses import dataclass
from tests_plugins_base import BASES, Base

@BASES.register("{name}")
@dataclass
class Policy(Base):
    size: int = {size}
"""
BASE = """
from dataclasses import dataclass
from qkv.registry import Registry

@dataclass
class Base:
    pass

BASES = Registry("plugin", Base, "tests_plugins")
"""


@dataclass
class Base:
    pass


@pytest.fixture
def registry() -> Registry[Base]:
    registry: Registry[Base] = Registry("thing", Base, "unused")
    registry._discovered = True

    @registry.register("small")
    @dataclass
    class Small(Base):
        size: int = 1

    @registry.register("large")
    @dataclass
    class Large(Base):
        size: int = 100
        label: str | None = None

    return registry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package `tests_plugins` with its registry in `tests_plugins_base`."""
    package = tmp_path / "tests_plugins"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "tests_plugins_base.py").write_text(BASE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for module in [m for m in sys.modules if m.startswith("tests_plugins")]:
        del sys.modules[module]


def discover(folder: Path) -> Registry[object]:
    import tests_plugins_base  # type: ignore[import-not-found]

    return tests_plugins_base.BASES


def test_build_from_a_name_a_mapping_and_an_instance(registry: Registry[Base]) -> None:
    small = registry.build("small")
    assert (small.name, small.size) == ("small", 1)  # type: ignore[attr-defined]
    large = registry.build({"name": "large", "size": 7, "label": "x"})
    assert (large.size, large.label) == (7, "x")  # type: ignore[attr-defined]
    assert registry.build(large) is large


def test_build_leaves_the_given_mapping_alone(registry: Registry[Base]) -> None:
    spec = {"name": "large", "size": 7}
    registry.build(spec)
    assert spec == {"name": "large", "size": 7}


def test_unknown_names_suggest_and_list(registry: Registry[Base]) -> None:
    with pytest.raises(ConfigError, match=r"unknown thing 'smal'; did you mean 'small'\? Allowed: large, small"):
        registry.build("smal")


@given(st.text())
def test_any_unknown_name_is_a_config_error(name: str) -> None:
    registry: Registry[Base] = Registry("thing", Base, "unused")
    registry._discovered = True
    with pytest.raises(ConfigError, match="unknown thing"):
        registry.get(name)


def test_settings_are_validated(registry: Registry[Base]) -> None:
    with pytest.raises(ConfigError, match=r"thing\.large: unknown key 'lable'; did you mean 'label'"):
        registry.build({"name": "large", "lable": "x"})
    with pytest.raises(ConfigError, match=r"thing\.large\.size: expected int, got 'big'"):
        registry.build({"name": "large", "size": "big"})


@pytest.mark.parametrize("spec", [None, 3, [], {}, {"size": 1}, {"name": None}])
def test_a_spec_without_a_name_is_a_config_error(registry: Registry[Base], spec: object) -> None:
    with pytest.raises(ConfigError, match="expected a name or"):
        registry.build(spec)  # type: ignore[arg-type]


def test_only_dataclasses_of_the_base_register(registry: Registry[Base]) -> None:
    with pytest.raises(TypeError, match="must be a dataclass derived from Base"):

        @registry.register("stranger")  # type: ignore[arg-type]
        @dataclass
        class Stranger:
            pass


def test_a_name_is_taken_once(registry: Registry[Base]) -> None:
    with pytest.raises(ValueError, match="thing 'small' is defined twice"):

        @registry.register("small")
        @dataclass
        class AnotherSmall(Base):
            pass


def test_discovery_imports_every_module_but_underscored_ones(folder: Path) -> None:
    (folder / "tiny.py").write_text(POLICY.format(name="tiny", size=1))
    (folder / "huge.py").write_text(POLICY.format(name="huge", size=9))
    (folder / "_helper.py").write_text("raise AssertionError('a private module is not imported by discovery')")
    assert discover(folder).names() == ["huge", "tiny"]
    assert discover(folder).build("huge").size == 9  # type: ignore[attr-defined]


def test_two_files_with_one_name_are_reported_with_both_files(folder: Path) -> None:
    (folder / "a.py").write_text(POLICY.format(name="same", size=1))
    (folder / "b.py").write_text(POLICY.format(name="same", size=2))
    with pytest.raises(ValueError, match=r"defined twice: in tests_plugins\.a and in tests_plugins\.b"):
        discover(folder).names()


def test_a_broken_policy_file_fails_every_time_and_not_only_the_first(folder: Path) -> None:
    (folder / "broken.py").write_text("import a_module_that_does_not_exist")
    for _ in range(2):
        with pytest.raises(ImportError, match="a_module_that_does_not_exist"):
            discover(folder).names()


def test_out_of_tree_modules_register_and_misses_name_the_module(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tests_plugins_outside.py").write_text(POLICY.format(name="outside", size=5))
    import_policy_modules(["tests_plugins_outside"])
    assert discover(folder).build("outside").size == 5  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="policy_modules: cannot import 'no_such_policy'"):
        import_policy_modules(["no_such_policy"])
