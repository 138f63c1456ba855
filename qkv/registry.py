"""Finds classes by their registered names, with errors made for people.

Takes: a name, or a mapping of a name and settings. Gives: the class, or an instance. A policy is one file: it decorates a
dataclass with `@REGISTRY.register("name")`, and discovery imports every module of the folder whose name does not start with an
underscore. The dataclass's fields are the policy's settings. Does not know about: what the policies do.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from qkv.errors import ConfigError
from qkv.validate import from_mapping, suggest

T = TypeVar("T")


class Registry(Generic[T]):
    """The named classes of one kind. `package`: the folder whose modules are imported, once, when a name is first asked for."""

    def __init__(self, kind: str, base: type[T], package: str) -> None:
        self.kind, self.base, self.package = kind, base, package
        self._classes: dict[str, type[T]] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator. Raises TypeError for a class that is no dataclass or does not derive from the base, and ValueError for
        a name that another class has."""

        def add(cls: type[T]) -> type[T]:
            if not (issubclass(cls, self.base) and dataclasses.is_dataclass(cls)):
                raise TypeError(f"{self.kind} '{name}': {cls.__qualname__} must be a dataclass derived from {self.base.__name__}")
            taken = self._classes.get(name)
            if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{self.kind} '{name}' is defined twice: in {taken.__module__} and in {cls.__module__}")
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        self._discover()
        return sorted(self._classes)

    def get(self, name: str) -> type[T]:
        """The class registered as `name`. Raises ConfigError that suggests a similar name."""
        self._discover()
        if name not in self._classes:
            raise ConfigError(f"unknown {self.kind} '{name}'; {suggest(name, self._classes)}")
        return self._classes[name]

    def build(self, spec: str | Mapping[str, Any] | T) -> T:
        """An instance, from 'lru' or {'name': 'lru', **fields}; an instance is returned as it is. Raises ConfigError."""
        if isinstance(spec, self.base):
            return spec
        fields = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
        name = fields.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{self.kind}: expected a name or {{name: ..., field: value}}, got {spec!r}")
        return from_mapping(self.get(name), fields, f"{self.kind}.{name}")

    def _discover(self) -> None:
        if self._discovered:
            return
        for module in sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(self.package).__path__)):
            if not module.startswith("_"):
                importlib.import_module(f"{self.package}.{module}")
        self._discovered = True


def import_policy_modules(modules: list[str]) -> None:
    """Import the users' own policy modules so that they register themselves. Raises ConfigError naming the module."""
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, TypeError, ValueError) as error:  # the latter two for what is no module's name
            raise ConfigError(f"policy_modules: cannot import '{module}': {error}") from error
