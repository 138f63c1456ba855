"""Charts. matplotlib is imported when a chart is drawn, never before.

Takes: labels and numbers. Gives: a PNG file.
Does not know about: records, which numbers matter.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path


def bars(path: Path, labels: Sequence[str], panels: Mapping[str, Sequence[float | None]], title: str) -> Path:
    """One small bar chart per panel, sharing the labels; None (not measured) leaves a gap. Returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = [plt.get_cmap("tab10")(i % 10) for i in range(len(labels))]
    figure, axes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.4), squeeze=False)
    for axis, (name, values) in zip(axes[0], panels.items(), strict=True):
        drawn = axis.bar(range(len(labels)), [v if v is not None else 0.0 for v in values], color=colors)
        axis.bar_label(drawn, [f"{v:.3g}" if v is not None else "-" for v in values], fontsize=8)
        axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
        axis.set_title(name, fontsize=9)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def bars_each(path: Path, panels: Mapping[str, Mapping[str, float]], title: str) -> Path:
    """One small bar chart per panel, each with labels of its own. Returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(4, len(panels))
    figure, axes = plt.subplots(-(-len(panels) // columns), columns, figsize=(3.6 * columns, 3.2 * -(-len(panels) // columns)))
    flat = list(axes.flat) if len(panels) > 1 else [axes]
    for axis, (name, values) in zip(flat, panels.items(), strict=False):
        drawn = axis.bar(range(len(values)), list(values.values()), color=[plt.get_cmap("tab10")(i) for i in range(len(values))])
        axis.bar_label(drawn, [f"{v:.3g}" for v in values.values()], fontsize=8)
        axis.set_xticks(range(len(values)), list(values), rotation=15, ha="right", fontsize=7)
        axis.set_title(name, fontsize=8)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in flat[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def heat_map(
    path: Path,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    title: str,
    across: str,
    down: str,
) -> Path:
    """Numbers in a coloured grid, colours by logarithm; None leaves a gap. Returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colors
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(1.5 + 1.2 * len(columns), 1.2 + 0.8 * len(rows)))
    flat = [x for row in values for x in row if x] or [1.0]
    scale = colors.LogNorm(min(flat), max(max(flat), min(flat) * 1.01))
    grid = [[float("nan") if x is None else x for x in row] for row in values]
    axis.imshow(grid, cmap="YlOrRd", norm=scale, aspect="auto")
    for i, row in enumerate(values):
        for j, x in enumerate(row):
            axis.text(j, i, "-" if x is None else f"{x:.3g}", ha="center", va="center", fontsize=9)
    axis.set_xticks(range(len(columns)), columns, fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.set_xlabel(across, fontsize=9)
    axis.set_ylabel(down, fontsize=9)
    axis.set_title(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def frontier(path: Path, points: Sequence[tuple[str, float, float, float]], best: Sequence[str], title: str) -> Path:
    """Two panels. points: (label, bits, KL, perplexity change in percent); `best` are joined by a line. Returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    families = sorted({label.split("(")[0].split()[0] for label, *_ in points})
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.6))
    for axis, which, name in ((axes[0], 2, "KL to none (nats per token)"), (axes[1], 3, "perplexity change (%)")):
        for point in points:
            color = plt.get_cmap("tab10")(families.index(point[0].split("(")[0].split()[0]) % 10)
            axis.plot(point[1], point[which], "o", color=color, markersize=6)
            axis.annotate(point[0], (point[1], point[which]), textcoords="offset points", xytext=(4, 4), fontsize=6)
        line = sorted((p for p in points if p[0] in best), key=lambda p: p[1])
        axis.plot([p[1] for p in line], [p[which] for p in line], "-", color="gray", linewidth=0.8, zorder=0)
        if which == 2:
            axis.set_yscale("log")
        else:
            axis.set_yscale("symlog", linthresh=0.1)
        axis.set_xlabel("effective bits per element, mean of K and V")
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def lines(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float | None]]]],
    title: str,
    x: str,
    log_x: bool = False,
    mark: float | None = None,
) -> Path:
    """One panel per entry, with its series as {name: [(x, y), ...]}; None leaves a gap. mark: a vertical line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, (name, series) in zip(axes[0], panels.items(), strict=True):
        for label, points in series.items():
            axis.plot(
                [p[0] for p in points], [p[1] if p[1] is not None else float("nan") for p in points], "o-", ms=3, label=label
            )
        if mark is not None:
            axis.axvline(mark, color="grey", linestyle=":", linewidth=1)
        if log_x:
            axis.set_xscale("log", base=2)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel(x, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            axis.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
