"""What the pages of several reports share: their style, templates, Pareto plots, and the command line of a report.

Takes: flattened rows. Gives: pieces of HTML. Does not know about: which rows a report compares.
"""

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

_PARETO = """<svg viewBox="0 0 {{ width }} {{ height }}"><text x="{{ pad }}" y="20" class="t">{{ title }}</text>
<path d="M{{ pad }},{{ pad }} V{{ height - pad }} H{{ width - pad }}"/>
<polyline points="{% for x, y in frontier %}{{ " " if not loop.first }}{{ "%.1f,%.1f" % (x, y) }}{% endfor %}"/>
{% for x, y, label, values in points %}
<circle cx="{{ "%.1f" % x }}" cy="{{ "%.1f" % y }}" r="4"><title>{{ label }}: {{ values }}</title></circle>
<text x="{{ "%.1f" % (x + 6) }}" y="{{ "%.1f" % (y - 4) }}">{{ label }}</text>
{% endfor %}
<text x="{{ width - pad }}" y="{{ height - pad + 16 }}" text-anchor="end">{{ "%.4g" % top_x }}</text>
<text x="{{ pad - 4 }}" y="{{ pad }}" text-anchor="end">{{ "%.4g" % top_y }}</text></svg>
"""


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

    shown = [(*place(px, py), label, f"{px:.6g}, {py:.6g}") for px, py, label in points]
    values = {"width": width, "height": height, "pad": pad, "title": title, "top_x": top_x, "top_y": top_y}
    return render(_PARETO, points=shown, frontier=[place(*p) for p in frontier], **values)


def render(template: str, **values: Any) -> str:
    """HTML from a Jinja template, as Markup: what is inserted is escaped unless it is Markup itself."""
    from jinja2 import StrictUndefined, Template  # here: most commands that import this module write no page
    from markupsafe import Markup

    text = Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined).render(values)
    return Markup(text)


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
