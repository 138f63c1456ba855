"""Rows of a JSON document, however it lays them out: a list, columns, an object with the list in it, or as pandas writes tables.

Takes: text. Gives: rows. Does not know about: files, what rows mean.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from calibration.text.names import CONVERSATION, ROLES, plain_name
from calibration.text.rows import Bad
from calibration.text.shapes import speaks

_HOLDERS = ("data", "rows", "records", "items", "examples", "documents", "results", "instances", "entries")
_SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "heldout")


def rows_of(text: str) -> Iterator[Any]:
    """Rows of one document, or of several one after the other. What cannot be read is one Bad row, the rest is kept."""
    decoder, at = json.JSONDecoder(), 0
    text = text.lstrip("\ufeff")
    while True:
        while at < len(text) and text[at] in " \t\r\n,\x1e":
            at += 1
        if at == len(text):
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield Bad("not JSON")
            at = _next_line(text, at)
            continue
        yield from of_value(value)


def of_value(value: Any) -> Iterator[Any]:
    """The rows that one JSON value stands for."""
    if isinstance(value, list):
        if value and all(_is_turn(m) for m in value):
            yield value
            return
        for row in value:
            yield row if isinstance(row, dict | list | str) else Bad("not a JSON object")
    elif isinstance(value, Mapping):
        yield from _of_object(value)
    else:
        yield value if isinstance(value, str) else Bad("not a JSON object")


def _of_object(value: Mapping[str, Any]) -> Iterator[Any]:
    columns, cells = value.get("columns"), value.get("data")
    if isinstance(columns, list) and isinstance(cells, list) and all(isinstance(r, list) for r in cells):  # pandas' split
        yield from (dict(zip(map(str, columns), row, strict=False)) for row in cells)
    elif (held := _held(value)) is not None:
        yield from of_value(held)
    elif _is_row(value):
        yield value
    elif value and all(isinstance(v, list) for v in value.values()):  # by columns, or several lists of rows
        if all(plain_name(k) in _SPLITS for k in value) and all(isinstance(r, Mapping) for v in value.values() for r in v):
            yield from (row for v in value.values() for row in v)
        else:
            longest = max(len(v) for v in value.values())
            yield from ({k: v[i] for k, v in value.items() if i < len(v)} for i in range(longest))
    elif value and all(isinstance(v, Mapping) for v in value.values()):
        keys = [list(v) for v in value.values()]
        if all(k == keys[0] for k in keys) and all(str(k).isdigit() for k in keys[0]):  # pandas' columns: {name: {row: cell}}
            yield from ({name: v[k] for name, v in value.items()} for k in keys[0])
        else:  # {row: {name: cell}}
            yield from value.values()
    else:
        yield value


def _is_row(value: Mapping[str, Any]) -> bool:
    """One row rather than a table by columns: a conversation, or a prompt with its answer in cells that are not all lists."""
    if all(isinstance(v, list | Mapping) for v in value.values()):
        return any(
            plain_name(k) in CONVERSATION and isinstance(v, list) and v and all(map(_is_turn, v)) for k, v in value.items()
        )
    return speaks(value)


def _is_turn(value: Any) -> bool:
    """A message, by its role."""
    said = next((value[k] for k in ("role", "from") if isinstance(value.get(k), str)), "") if isinstance(value, Mapping) else ""
    return plain_name(said) in ROLES


def _held(value: Mapping[str, Any]) -> list[Any] | None:
    """The list of rows in an object: under a name for such, or the only list of objects in one that is no row itself."""
    lists = {plain_name(k): v for k, v in value.items() if isinstance(v, list) and v and all(isinstance(r, Mapping) for r in v)}
    rows = {k: v for k, v in lists.items() if not all(map(_is_turn, v))}
    for name in _HOLDERS:
        if name in rows:
            return rows[name]
    if len(rows) == 1 and not _is_row(value):
        return next(iter(rows.values()))
    return None


def _next_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1
