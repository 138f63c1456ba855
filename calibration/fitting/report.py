"""The calibration report: one HTML file with its charts inside, and the same numbers as JSON.

Takes: the dictionary of diagnose.py with what was measured. Gives: report.html, report.json and the charts as PNG files.
Does not know about: models, quantizers. matplotlib and jinja2 are imported when a report is written, never before.
"""

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write(folder: Path, report: Mapping[str, Any]) -> list[Path]:
    """Writes report.json, report.html and *.png into `folder`; returns the charts."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "report.json", json.dumps(report, indent=1) + "\n")
    charts = _charts(folder, report["layers"])
    _replace(folder / "report.html", _page(report, charts))
    return charts


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _page(report: Mapping[str, Any], charts: Sequence[Path]) -> str:
    accuracy, memory = report.get("accuracy"), report["memory"]
    bits = (memory["effective_bits_k"] + memory["effective_bits_v"]) / 2
    facts = [
        ("model", report["model"]),
        ("quantizer", f"{report['quantizer']} {report['quantizer_fields'] or ''}, method {report['method']}"),
        ("data", f"{report['data']}: {report['documents']:,} documents, {report['tokens']:,} tokens; {report['sampling']}"),
        ("reading", report["reading"]),
        ("effective bits", f"K {memory['effective_bits_k']:.2f}, V {memory['effective_bits_v']:.2f}, mean {bits:.2f}"),
        (
            "memory",
            f"{memory['kv_bytes_per_token']:,.0f} bytes per token, {100 * (1 - bits / 16):.0f} % less than 16 bits; "
            f"{memory['static_bytes']:,} bytes of scales",
        ),
    ]
    if accuracy:
        error = accuracy.get("perplexity_delta_pct_stderr")
        facts.append(
            (
                "held-back documents",
                f"perplexity {accuracy['perplexity']:.3f} ({accuracy['perplexity_delta_pct']:+.2f} %"
                + (f" ± {error:.2f}" if error is not None else "")
                + f" against none), KL {accuracy['kl_divergence']:.5f} nats, top-1 {100 * accuracy['top1_agreement']:.1f} %, "
                f"{accuracy['tokens_scored']:,} tokens, read through the cache",
            )
        )
    from jinja2 import StrictUndefined, Template

    images = [(c.stem, base64.b64encode(c.read_bytes()).decode()) for c in charts]
    template = Template(_PAGE, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    advice = report["suggestions"]["lines"] or ["nothing stands out"]
    told = {name: report[name] for name in ("model", "warnings", "first_rows", "next_data")}
    return template.render(told, facts=facts, advice=advice, images=images, layers=map(_cells, report["layers"]))


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Calibration of {{ model }}</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}pre{white-space:pre-wrap;background:#f3f3f3;padding:.4rem}
.warning{background:#fde8e8;border-left:.3rem solid #c00;padding:.4rem .8rem;font-weight:bold}
img{max-width:100%}code{background:#f3f3f3;padding:0 .2rem}small{color:#666}</style>
<h1>Calibration of {{ model }}</h1>
{% for line in warnings %}
<p class="warning">Warning: {{ line }}</p>
{% endfor %}
<table>
{% for name, value in facts %}
<tr><td>{{ name }}</td><td style="text-align:left">{{ value }}</td></tr>
{% endfor %}
</table><h2>The first rows, as they were read</h2><ol>
{% for text in first_rows %}
<li><pre>{{ text }}</pre></li>
{% endfor %}
</ol><h2>What stands out</h2><ul>
{% for line in advice %}
<li>{{ line }}</li>
{% endfor %}
</ul><h2>Which data to use next</h2><ul>
{% for line in next_data %}
<li>{{ line }}</li>
{% endfor %}
</ul><h2>Charts</h2>
{% for name, data in images %}
<p><img alt="{{ name }}" src="data:image/png;base64,{{ data }}"></p>
{% endfor %}
<h2>Layers</h2><table>
<tr><th>layer</th><th>largest |K|</th><th>largest |V|</th><th>V per token, p50 / p99</th><th>outlier channels</th>
<th>saturated K / V</th><th>output error</th></tr>
{% for cells in layers %}
<tr>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table><p><small>Head with the largest value; output error relative, worst head.</small></p>
<p><small>All numbers: report.json beside this file.</small></p></html>
"""


def _cells(e: Mapping[str, Any]) -> list[str]:
    """The row of one layer in the table."""
    outliers = ", ".join(f"h{o['head']} c{o['channel']} ({o['ratio']:.0f}×)" for o in e["outliers"][:3])
    more = f" +{len(e['outliers']) - 3}" if len(e["outliers"]) > 3 else ""
    saturated = " / ".join(f"{100 * e['saturation'][s]:.3f} %" if s in e["saturation"] else "dynamic" for s in "kv")
    error = f"{100 * max(e['output_error']):.2f} %" if "output_error" in e else "-"
    spread = f"{max(e['v_token']['p50']):.3g} / {max(e['v_token']['p99']):.3g}"
    largest = [f"{max(e['k_absmax']):.3g}", f"{max(e['v_absmax']):.3g}"]
    return [str(e["layer"]), *largest, spread, outliers + more or "-", saturated, error]


def _charts(folder: Path, layers: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Heat maps of layers by heads, and what was measured per layer."""
    index = [e["layer"] for e in layers]
    maps = {
        "largest |K|": [e["k_absmax"] for e in layers],
        "largest |V|": [e["v_absmax"] for e in layers],
        "largest K channel / median channel": [e["k_channel_ratio_max"] for e in layers],
    }
    charts = [_figure(folder / "ranges.png", len(maps), lambda axes: _heat(axes, maps, index))]
    if "output_error" in layers[0]:
        lines = {
            "relative error of attention output, per head": [e["output_error"] for e in layers],
            "of it, from K": [e["output_error_k"] for e in layers],
            "with 8-bit keys per token": [e["output_error_int8_token_k"] for e in layers],
        }
        charts.append(_figure(folder / "output_error.png", len(lines), lambda axes: _dots(axes, lines, index)))
        shares = {"share of attention on the first positions": [e["sink_share"] for e in layers]}
        charts.append(_figure(folder / "sinks.png", 1, lambda axes: _heat(axes, shares, index, "position")))
    rates = {side: [[e["saturation"].get(side, 0.0)] for e in layers] for side in ("k", "v")}
    shown = {f"saturated share of {s.upper()}": r for s, r in rates.items() if any(s in e["saturation"] for e in layers)}
    if shown:
        charts.append(_figure(folder / "saturation.png", len(shown), lambda axes: _dots(axes, shown, index)))
    return charts


def _figure(path: Path, panels: int, draw: Callable[[Any], None]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(4.2 * panels, 4), squeeze=False)
    draw(axes[0])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _heat(axes: Any, maps: Mapping[str, Sequence[Sequence[float]]], index: Sequence[int], across: str = "kv head") -> None:
    for axis, (name, values) in zip(axes, maps.items(), strict=True):
        image = axis.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest")
        step = max(1, len(index) // 10)
        axis.set_yticks(range(0, len(index), step), index[::step])
        axis.set_xticks(range(len(values[0])))
        axis.set_title(name, fontsize=9)
        axis.set_xlabel(across, fontsize=8)
        axis.set_ylabel("layer", fontsize=8)
        axis.figure.colorbar(image, ax=axis)


def _dots(axes: Any, lines: Mapping[str, Sequence[Sequence[float]]], index: Sequence[int]) -> None:
    for axis, (name, values) in zip(axes, lines.items(), strict=True):
        for i, row in zip(index, values, strict=True):
            axis.plot([i] * len(row), [100 * x for x in row], "o", color="tab:blue", markersize=3)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("layer", fontsize=8)
        axis.set_ylabel("%", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
