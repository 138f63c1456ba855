"""Tables for people, on the terminal.

Takes: a title, column headings and rows of text. Gives: printed output.
Does not know about: records. Numbers are formatted by `number`.
"""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 160  # columns assumed where there is no terminal to ask


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def number(value: float | int | str | None, digits: int = 1, signed: bool = False, suffix: str = "") -> str:
    """1234.5 -> '1,234.5'; None -> '-' (not measured)."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    sign = "+" if signed else ""
    text = f"{value:{sign},d}" if isinstance(value, int) else f"{value:{sign},.{digits}f}"
    return text + suffix


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str | None = None, text: Sequence[int] = (0,)
) -> None:
    """Print one table; numbers are right-aligned, the columns of `text` (by default the first) left-aligned."""
    table = Table(title=title, caption=note, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)
