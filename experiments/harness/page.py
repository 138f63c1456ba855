"""What the pages of several reports share: their style, Pareto plots, and the command line of a report.

Takes: flattened rows. Gives: pieces of HTML. Does not know about: which rows a report compares.
"""

import html
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.errors import ConfigError

STYLE = """body { font: 14px system-ui, sans-serif; margin: 2em; color: #222 }
table { border-collapse: collapse } th, td { padding: 3px 10px; border-bottom: 1px solid #ddd; text-align: left }
th { cursor: pointer; position: sticky; top: 0; background: #f6f6f6 } .n { text-align: right } small { color: #777 }
svg { width: 460px; margin: 0 1em 1em 0 } svg path { fill: none; stroke: #999 } circle { fill: #1f77b4 }
polyline { fill: none; stroke: #d62728; stroke-width: 1.5 }
svg text { font-size: 10px; fill: #444 } svg .t { font-size: 13px }"""


def pareto(rows: Iterable[Mapping[str, Any]], title: str, x: str, y: str, more: bool) -> str:
    """An SVG of the rows that have both values; empty with fewer than two different points."""
    points = [
        (float(row[x]), float(row[y]), str(row["label"])) for row in rows if is_number(row.get(x)) and is_number(row.get(y))
    ]
    if len({p[:2] for p in points}) < 2:
        return ""
    best, frontier = None, []
    for px, py, _ in sorted(points, key=lambda p: (p[0], -p[1] if more else p[1])):
        if best is None or (py > best if more else py < best):
            best = py
            frontier.append((px, py))
    width, height, pad = 460, 300, 50
    top_x, top_y = max(p[0] for p in points) or 1.0, max(p[1] for p in points) or 1.0

    def place(px: float, py: float) -> tuple[float, float]:
        return pad + px / top_x * (width - 2 * pad), height - pad - py / top_y * (height - 2 * pad)

    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*p) for p in frontier))
    dots = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4"><title>{html.escape(label)}: {px:.6g}, {py:.6g}</title></circle>'
        f'<text x="{a + 6:.1f}" y="{b - 4:.1f}">{html.escape(label)}</text>'
        for px, py, label in points
        for a, b in [place(px, py)]
    )
    axes = f'<path d="M{pad},{pad} V{height - pad} H{width - pad}"/>'
    ends = f'<text x="{width - pad}" y="{height - pad + 16}" text-anchor="end">{top_x:.4g}</text>'
    ends += f'<text x="{pad - 4}" y="{pad}" text-anchor="end">{top_y:.4g}</text>'
    head = f'<text x="{pad}" y="20" class="t">{html.escape(title)}</text>'
    return f'<svg viewBox="0 0 {width} {height}">{head}{axes}<polyline points="{line}"/>{dots}{ends}</svg>'


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def command(arguments: Sequence[str], keys: Sequence[str], make: Callable[[list[Path], dict[str, str]], None]) -> int:
    """The command line of a report: paths, and key=value of `keys`. Calls make(paths, settings); returns the exit code."""
    given = tuple(f"{key}=" for key in keys)
    settings = dict(a.split("=", 1) for a in arguments if a.startswith(given))
    paths = [Path(a) for a in arguments if not a.startswith(given)]
    try:
        make(paths, settings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
