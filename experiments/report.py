"""Makes one page of many records: a table that sorts, Pareto plots, and differences from a baseline.

    python -m experiments.report outputs/throughput/sweep_1a2b3c4d [baseline=old/record.json] [out=report.html]

Takes: folders with record.json in them, or records. Gives: one self-contained HTML file, and the table on the screen.
Does not know about: how anything was measured.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.page import STYLE, command, is_number, pareto, render
from experiments.harness.record import flatten
from experiments.harness.table import console, number, show
from qkv.errors import ConfigError

# heading, key of a flattened row, digits
COLUMNS = [
    ("KV B/token", "memory/kv_bytes_per_token", 0),
    ("capacity", "memory/capacity_tokens", 0),
    ("utilization", "memory/utilization_mean", 3),
    ("tok/s", "speed/output_tokens_per_s", 1),
    ("prefill tok/s", "speed/prefill_tokens_per_s", 0),
    ("decode tok/s", "speed/decode_tokens_per_s", 1),
    ("TTFT p50 s", "speed/ttft_s/p50", 3),
    ("TTFT p95 s", "speed/ttft_s/p95", 3),
    ("TPOT p50 s", "speed/tpot_s/p50", 4),
    ("hit rate", "cache/hit_rate", 3),
    ("preempted", "cache/preemptions", 0),
    ("PPL", "accuracy/perplexity", 3),
    ("KL", "accuracy/kl_divergence", 5),
    ("top-1", "accuracy/top1_agreement", 4),
    ("plan ms", "scheduler/plan_ms/p50", 3),
    ("requests", "plan/requests", 0),
]
# title, x, y, whether a larger y is better (a smaller x always is)
PARETO = [
    ("Tokens/s against KV bytes per token", "memory/kv_bytes_per_token", "speed/output_tokens_per_s", True),
    ("Tokens/s against waiting (TTFT p50, s)", "speed/ttft_s/p50", "speed/output_tokens_per_s", True),
    ("KL to none against KV bytes per token", "memory/kv_bytes_per_token", "accuracy/kl_divergence", False),
]


@dataclass
class Report:
    """What the page shows. rows: flattened rows, with `job` and the settings in which jobs differ. problems: jobs that failed or
    were interrupted."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    baseline: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def columns(self) -> list[tuple[str, str, int]]:
        return [column for column in COLUMNS if any(is_number(row.get(column[1])) for row in self.rows)]

    def difference(self, row: Mapping[str, Any], key: str) -> float | None:
        """The relative change from the baseline's row of the same label."""
        old, new = self.baseline.get(str(row.get("label")), {}).get(key), row.get(key)
        return new / old - 1 if is_number(old) and is_number(new) and old and new is not None else None


def collect(paths: Sequence[Path], baseline: Path | None = None) -> Report:
    """Read all records in these paths. Raises ConfigError, naming the path, where there is nothing to read."""
    report, files = Report(), [file for path in paths for file in _records(path)]
    records = [(file, _read(file)) for file in files]
    configs = [flatten(record.get("config", {})) for _, record in records if not record.get("error")]
    # A setting that only some jobs have belongs to the policy that they name, and the policy's name is shown already.
    keys = [key for key in (configs[0] if configs else {}) if all(key in config for config in configs)]
    report.settings = [key for key in keys if len({json.dumps(config[key]) for config in configs}) > 1]
    for file, record in records:
        job = file.parent.name
        report.sources.append(str(file))
        if record.get("error") or record.get("interrupted"):
            report.problems.append((job, str(record.get("error") or "interrupted: what it measured until then is in the table")))
        config = flatten(record.get("config", {}))
        for i, row in enumerate(record.get("rows", [])):
            flat = flatten(row)
            flat.setdefault("label", flat.get("policy/quantizer", f"row {i}"))
            report.rows.append({"job": job, **{f"config/{key}": config.get(key) for key in report.settings}, **flat})
    if baseline is not None:
        for i, row in enumerate(_read(baseline).get("rows", [])):
            flat = flatten(row)
            report.baseline[str(flat.get("label", flat.get("policy/quantizer", f"row {i}")))] = flat
    return report


def _records(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted(path.rglob("record.json"), key=_natural)
    if not found:
        raise ConfigError(f"'{path}' has no record.json in it; give a folder that an experiment or a sweep wrote")
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else 0, part) for part in path.parts]


def _read(file: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read record '{file}': {error}") from None
    return record


def print_table(report: Report) -> None:
    """Print the rows as a table."""
    columns = report.columns
    heads = [*(key.rpartition(".")[2] for key in map(_short, report.settings)), "row", *(heading for heading, _, _ in columns)]
    cells = []
    for row in report.rows:
        own = [str(row[f"config/{key}"]) for key in report.settings]
        values = [number(row.get(key), digits) if is_number(row.get(key)) else "-" for _, key, digits in columns]
        cells.append([*own, str(row["label"]), *values])
    show("All jobs", heads, cells, text=range(len(report.settings) + 1))
    for job, message in report.problems:
        console().print(f"job {job}: {message}")


def write(report: Report, out: Path) -> Path:
    """Write the page, which loads nothing from the network. Raises ConfigError when the file cannot be written."""
    columns = report.columns
    heads = ["job", *map(_short, report.settings), "row", *(heading for heading, _, _ in columns)]
    lines = []
    for row in report.rows:
        words = [row["job"], *(row[f"config/{key}"] for key in report.settings), row["label"]]
        numbers = []
        for _, key, digits in columns:
            value, change = row.get(key), report.difference(row, key)
            shown = number(value, digits) if is_number(value) else "-"
            numbers.append((value if is_number(value) else "", shown, None if change is None else f"{100 * change:+.1f} %"))
        lines.append((words, numbers))
    plots = list(filter(None, (pareto(report.rows, *plot) for plot in PARETO)))
    page = render(_PAGE, style=STYLE, report=report, heads=heads, lines=lines, plots=plots)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report '{out}': {error.strerror}") from None
    return out


def _short(key: str) -> str:
    return key.replace("/", ".").removesuffix(".name")


_PAGE = """<!doctype html><meta charset="utf-8"><title>qkv report</title>
<style>
{{ style }}
</style>
<h1>Report</h1>
{% if report.baseline %}
<p>Small figures: change against the baseline's row of the same name.</p>
{% endif %}
<table id="t"><thead><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr></thead><tbody>
{% for words, numbers in lines %}
<tr>{% for word in words %}<td>{{ word }}</td>{% endfor %}
{% for value, shown, change in numbers %}
<td class="n" data-v="{{ value }}">{{ shown }}{% if change %} <small>{{ change }}</small>{% endif %}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table>
{% if report.problems %}
<h2>Failed or interrupted</h2><ul>
{% for job, text in report.problems %}
<li><b>job {{ job }}</b>: {{ text }}</li>
{% endfor %}
</ul>
{% endif %}
{% if plots %}
<h2>Pareto plots</h2><p>The line joins what nothing else beats in both.</p>
{% for plot in plots %}
{{ plot }}
{% endfor %}
{% endif %}
<h2>Records</h2><ul>
{% for source in report.sources %}
<li>{{ source }}</li>
{% endfor %}
</ul>
<script>
document.querySelectorAll("#t th").forEach((th, i) => th.onclick = () => {
  const body = document.querySelector("#t tbody"), up = th.dataset.up = th.dataset.up === "1" ? "0" : "1";
  const key = row => {
    const cell = row.cells[i];
    return "v" in cell.dataset ? parseFloat(cell.dataset.v || "-Infinity") : cell.textContent;
  };
  const order = (a, b) => (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0) * (up === "1" ? 1 : -1);
  [...body.rows].sort(order).forEach(row => body.append(row));
});
</script>
"""


def _make(paths: list[Path], settings: dict[str, str]) -> None:
    if not paths:
        raise ConfigError("say what to report on: python -m experiments.report outputs/... [baseline=record.json] [out=file]")
    report = collect(paths, Path(settings["baseline"]) if "baseline" in settings else None)
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    print_table(report)
    print(f"report: {write(report, Path(settings.get('out', folder / 'report.html')))}")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    return command(arguments, ("baseline", "out"), _make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
