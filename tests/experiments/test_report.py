"""Reports and sweeps: one page, nothing lost when a job fails, nothing run twice."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from experiments import report, run

SWEEP = ["-m", "experiment=throughput", "workload.num_requests=70", "pool_tokens=20000", "quantizers=[]", "logger=none"]
SWEEP += ["surface_pools=[]", "surface_lengths=[]"]


def record(folder: Path, rows: list[dict[str, Any]], **rest: Any) -> Path:
    folder.mkdir(parents=True)
    path = folder / "record.json"
    path.write_text(json.dumps({"config": {"seed": 0}, "rows": rows} | rest))
    return path


def row(label: str, kv: float, rate: float, kl: float | None = None) -> dict[str, Any]:
    values: dict[str, Any] = {"label": label, "memory": {"kv_bytes_per_token": kv}, "speed": {"output_tokens_per_s": rate}}
    return values | ({"accuracy": {"kl_divergence": kl}} if kl is not None else {})


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(v) for k, v in attrs if k in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def page(path: Path) -> Cells:
    cells = Cells()
    cells.feed(path.read_text(encoding="utf-8").partition("</table>")[0])
    return cells


def test_a_report_shows_every_row_and_needs_nothing_from_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "0", [row("none", 100, 10, 0.0), row("<b>int8</b>", 50, 20, 0.001)])
    record(tmp_path / "1", [row("int4", 25, 15, 0.1)], config={"seed": 1})
    assert report.main([str(tmp_path)]) == 0
    found = page(tmp_path / "report.html")
    assert found.links == []
    assert found.rows[0][:3] == ["job", "seed", "row"]
    assert [r[2] for r in found.rows[1:]] == ["none", "<b>int8</b>", "int4"]
    text = (tmp_path / "report.html").read_text()
    assert text.count("<svg") == 2
    assert "http" not in text
    out = capsys.readouterr().out
    assert "int4" in out
    assert "report.html" in out


def test_differences_from_a_baseline_are_shown_by_row_name(tmp_path: Path) -> None:
    record(tmp_path / "new" / "0", [row("none", 100, 11), row("int8", 50, 20)])
    old = record(tmp_path / "old", [row("none", 100, 10)])
    assert report.main([str(tmp_path / "new"), f"baseline={old}", f"out={tmp_path / 'r.html'}"]) == 0
    none, int8 = page(tmp_path / "r.html").rows[1:]
    assert any("+10.0 %" in cell for cell in none)
    assert not any("%" in cell for cell in int8)


def test_the_pareto_line_joins_what_nothing_beats() -> None:
    rows = [report.flatten(r) for r in (row("a", 10, 5), row("b", 20, 9), row("c", 30, 7), row("d", 10, 4))]
    svg = report.pareto(rows, "t", "memory/kv_bytes_per_token", "speed/output_tokens_per_s", True)
    (points,) = re.findall(r'polyline points="([^"]*)"', svg)
    assert len(points.split()) == 2
    assert report.pareto(rows[:1], "t", "memory/kv_bytes_per_token", "speed/output_tokens_per_s", True) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to report on"),
        (["nowhere"], "no record.json"),
        (["{bad}"], "cannot read record"),
        (["{good}", "out=/nowhere/x"], "cannot write"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = record(tmp_path / "good", [row("a", 1, 1)]), tmp_path / "bad.json"
    bad.write_text("{")
    assert report.main([a.format(good=good, bad=bad) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_failed_job_leaves_the_others_and_a_rerun_skips_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = [*SWEEP, "allocator.block_size=16,17", f"hydra.sweep.dir={tmp_path}"]
    assert run.main(sweep) == 2
    out = capsys.readouterr().out
    assert "job 1: allocator.paged: block_size=17 is not allowed" in out
    first = json.loads((tmp_path / "0" / "record.json").read_text())
    assert first["finished"] is True
    text = (tmp_path / "report.html").read_text()
    assert "block_size=17 is not allowed" in text
    assert "paged + prefix cache" in text
    before = (tmp_path / "0" / "record.json").stat().st_mtime_ns
    assert run.main(sweep) == 2
    assert capsys.readouterr().out.count("finished before, skipped") == 1
    assert (tmp_path / "0" / "record.json").stat().st_mtime_ns == before


def test_a_bug_in_one_job_is_shown_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = run.build

    def build(values: Any, *rest: Any) -> Any:
        experiment, built = original(values, *rest)
        if values["seed"] == 1:
            experiment.run = lambda _: 1 / 0  # type: ignore[method-assign,assignment]
        return experiment, built

    monkeypatch.setattr(run, "build", build)
    assert run.main([*SWEEP, "seed=1,2", f"hydra.sweep.dir={tmp_path}"]) == 1
    captured = capsys.readouterr()
    assert "ZeroDivisionError" in captured.err
    assert "job 0: ZeroDivisionError: division by zero" in captured.out
    assert json.loads((tmp_path / "1" / "record.json").read_text())["finished"] is True


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert run.main(["experiment=plan", "model=llama2-7b", "device=a100-80g", f"hydra.run.dir={file}/run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot write ")
