"""Turns plain mappings (from YAML or keyword arguments) into dataclasses, with errors made for people.

Takes: a dataclass and a mapping. Gives: an instance, or a ConfigError that names the key, the value and what is allowed.
Does not know about: Hydra, files, policies.
"""

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from qkv.errors import ConfigError

T = TypeVar("T")

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{p}b": m for p, m in list(_UNITS.items()) if p not in ("", "b")}
_UNITS |= {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")}


def suggest(name: str, allowed: Iterable[str]) -> str:
    """The end of an error message: "did you mean ..." where an allowed name is similar, then all allowed names."""
    names = sorted(allowed)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}Allowed: {', '.join(names) if names else '(none)'}"


def parse_bytes(value: int | float | str | None, where: str) -> int | None:
    """'2GiB', '500MB', 1073741824 -> bytes. None stays None. Raises ConfigError."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(value).lower())
    if not match or match[2] not in _UNITS or not math.isfinite(float(match[1]) * _UNITS[match[2]]):
        raise ConfigError(f"{where}: '{value}' is not a size. Write bytes as a number, or like 512MiB, 2GiB, 4GB")
    return int(float(match[1]) * _UNITS[match[2]])


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build dataclass `cls` from `values`. Every error message begins with `where`, e.g. 'quantizer.int8'.

    Raises ConfigError for unknown keys, missing keys, wrong types and, through __post_init__, values out of range.
    A field whose type is a dataclass takes a mapping.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    hints = _hints(cls)  # type: ignore[arg-type]
    out: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key '{key}'; {suggest(str(key), fields)}")
        out[key] = _coerce(value, hints[key], f"{where}.{key}")
    missing = [
        f.name
        for f in fields.values()
        if f.name not in out and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    try:
        return cls(**out)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None


def require(ok: bool, field: str, value: object, allowed: str) -> None:
    """A range check for __post_init__: raises ConfigError, naming the field, its value and what is allowed, unless `ok`."""
    if not ok:
        raise ConfigError(f"{field}={value!r} is not allowed; it must be {allowed}")


def check_types(instance: Any) -> None:
    """Raise ConfigError unless every field's value fits its annotation; for dataclasses that users construct by hand."""
    for name, hint in _hints(type(instance)).items():  # type: ignore[arg-type]
        _coerce(getattr(instance, name), hint, name)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """The value as the type `hint` asks for it. Raises ConfigError, beginning with `where`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for arg in (a for a in args if a is not type(None)):
            try:
                return _coerce(value, arg, where)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{where}: '{value}' is not allowed; {suggest(str(value), map(str, args))}")
        return value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        if isinstance(value, Mapping):
            return from_mapping(hint, value, where)  # type: ignore[arg-type]
        raise ConfigError(f"{where}: expected a mapping, got {value!r}")
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, got {value!r}")
        inner = args[0] if args else Any
        return origin(_coerce(v, inner, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a mapping, got {value!r}")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where}: a whole number of {value.bit_length()} bits is too large") from None
    if hint in (int, float, str, bool):
        if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
            raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r}")
        return value
    return value
