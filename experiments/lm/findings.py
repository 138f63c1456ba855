"""Shows what experiment=accuracy found: as tables on the screen and in W&B, and as one page that needs no other file.

Takes: a run's record.json and flips.json. Gives: the same tables everywhere, and the frontier of bits against KL divergence.
Does not know about: how anything was measured.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.page import STYLE, pareto, render
from experiments.harness.plots import frontier
from experiments.harness.table import console, number, show
from experiments.measuring.bits import bits, on_frontier
from qkv.errors import ConfigError

_SHOWN = 12  # so many flips are shown on the screen


class Table(NamedTuple):
    """One table. name: its name in W&B. note: how to read it. text: indices of the columns that hold words, not numbers."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str
    text: Sequence[int] = (0,)


def tables(record: Mapping[str, Any], flips: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The tables of verdicts, divergence and flips. A run that was cut short has the rows that it finished."""
    return [_verdicts(record), _divergence(record), _flips(flips)]


def _verdicts(record: Mapping[str, Any]) -> Table:
    rows = []
    for row in record["rows"]:
        for name, t in row["accuracy"].get("tasks", {}).items():
            digits = 3 if t["unit"] == "points" else 4
            flipped = f"{t['lost']}/{t['gained']}" if "lost" in t else "-"
            rows.append(
                [
                    row["label"],
                    name,
                    t["metric"],
                    f"{number(t['value'], digits)} ± {number(t['stderr'], digits)}",
                    number(t.get("delta"), digits, signed=True),
                    number(t.get("p_adjusted"), 3),
                    flipped,
                    _percent(t["fraction_read_from_cache"]),
                    t.get("verdict", "baseline" if t["read_through_cache"] else "baseline, not read through the cache"),
                ]
            )
    columns = ["quantizer", "task", "metric", "value", "Δ none", "p", "lost/gained", "from cache", "verdict"]
    note = (
        "p: of the paired test on the same samples (McNemar for right and wrong, bootstrap for scores), corrected for the number "
        "of comparisons (Holm). lost/gained: samples whose score fell or rose. from cache: keys that attention read as stored."
    )
    cut = {
        name: (t["truncated_requests"], t["truncated_tokens"])
        for row in record["rows"]
        for name, t in row["accuracy"].get("tasks", {}).items()
        if t["truncated_requests"]
    }
    note += "".join(f" {name}: {n} prompts were too long and lost their first {k} tokens in all." for name, (n, k) in cut.items())
    return Table("accuracy", _title(record), columns, rows, note, (0, 1, 2, 8))


def _divergence(record: Mapping[str, Any]) -> Table:
    rows = []
    for row in record["rows"]:
        a, tasks = row["accuracy"], row["accuracy"].get("tasks", {}).values()
        rows.append(
            [
                row["label"],
                number(bits(row), 2) if "memory" in row else "-",
                number(a.get("perplexity"), 3),
                number(a.get("perplexity_delta_pct"), 2, signed=True, suffix=" %"),
                number(a.get("kl_divergence"), 5),
                number(a.get("schedule_kl"), 5),
                _percent(a.get("top1_agreement")),
                _percent(a.get("fraction_read_from_cache")),
                number(sum(t["samples"] for t in tasks)),
                number(sum(t["prefill_tokens"] + t["generated_tokens"] for t in tasks)),
                number(sum(t["seconds"] for t in tasks), 0),
            ]
        )
    columns = ["quantizer", "bits", "PPL", "ΔPPL", "KL", "schedule KL", "top-1", "from cache", "samples", "tokens run", "task s"]
    config = record["config"]
    note = (
        f"PPL to top-1: {config['documents']} x {config['tokens_per_document']} tokens of {config['data']['name']} against none. "
        "schedule KL: of a quantizer against itself, cut into other chunks; a KL near it is rounding, not the quantizer."
    )
    return Table("divergence", "Beside the tasks", columns, rows, note)


def _flips(flips: Sequence[Mapping[str, Any]]) -> Table:
    keys = ["quantizer", "task", "sample", "flip", "target", "none_answers", "quantizer_answers", "prompt_end"]
    rows = [[str(flip[key]) for key in keys] for flip in flips]
    return Table("flips", "Samples that flipped", [k.replace("_", " ") for k in keys], rows, "", (0, 1, 3, 4, 5, 6, 7))


def _title(record: Mapping[str, Any]) -> str:
    model, config = record.get("model", {}), record["config"]
    limit = config["limit"]
    return f"Tasks on {model.get('name')} ({model.get('dtype')}), {f'at most {limit}' if limit else 'all'} samples each"


def _percent(value: float | None) -> str:
    return number(None if value is None else 100 * value, 1, suffix=" %")


def print_tables(found: Sequence[Table]) -> None:
    for table in found:
        rows, columns, text = table.rows, table.columns, table.text
        if table.name == "flips":  # the prompts are for the page
            rows, columns, text = [_short(row[:-1]) for row in rows[:_SHOWN]], columns[:-1], range(7)
        if rows:
            show(table.title, columns, rows, text=text)
        if len(rows) < len(table.rows):
            console().print(f"{len(table.rows) - len(rows)} more in flips.json and accuracy.html")
        if table.note:
            console().print(table.note + "\n")


def _short(cells: Sequence[str]) -> list[str]:
    return [" ".join(c.split())[:40] for c in cells]


def write(record: Mapping[str, Any], flips: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write the page, which loads nothing from the network. Raises ConfigError when the file cannot be written."""
    points = [
        {"label": row["label"], "bits": bits(row), "kl": row["accuracy"]["kl_divergence"]}
        for row in record["rows"]
        if "memory" in row and "kl_divergence" in row["accuracy"]
    ]
    page = render(
        _PAGE,
        style=STYLE,
        tables=tables(record, flips),
        cell_class=_cell_class,
        unfinished=record.get("interrupted") or record.get("error"),
        plot=pareto(points, "bits against KL divergence", "bits", "kl", False),
        settings=json.dumps(record["config"], indent=1),
    )
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report '{out}': {error.strerror}") from None
    return out


_PAGE = """<!doctype html><meta charset="utf-8"><title>qkv accuracy</title><style>{{ style }}
td { vertical-align: top } .loss { color: #b00; font-weight: bold } .prompt { color: #777; max-width: 40em }</style>
<h1>Accuracy through the quantized cache</h1>
{% if unfinished %}
<p><b>This run did not finish.</b></p>
{% endif %}
{% for table in tables %}
<h2>{{ table.title }}{% if table.name == "flips" %} ({{ table.rows | length }}){% endif %}</h2>
<table><tr>{% for column in table.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for cell in row %}<td class="{{ cell_class(table, loop.index0, cell) }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table><p>{{ table.note }}</p>
{% endfor %}
{{ plot }}
<h2>Settings</h2><pre>{{ settings }}</pre>
"""


def _cell_class(table: Table, column: int, text: str) -> str:
    if table.columns[column] == "verdict" and text.startswith("loss"):
        return "loss"
    if table.columns[column] == "prompt end":
        return "prompt"
    return "" if column in table.text else "n"


def plot(record: Mapping[str, Any], out: Path) -> None:
    """Plot the frontier: bits against KL divergence and perplexity, of the rows that have all three."""
    rows = sorted((r for r in record["rows"] if "kl_divergence" in r["accuracy"]), key=lambda r: (bits(r), r["label"]))
    rows = [row for row in rows if row["accuracy"]["kl_divergence"] > 0]  # none itself has no place on a logarithmic axis
    if not rows:
        return
    points = [(r["label"], bits(r), r["accuracy"]["kl_divergence"], r["accuracy"]["perplexity_delta_pct"]) for r in rows]
    frontier(out, points, [row["label"] for row in on_frontier(rows)], _title(record))
