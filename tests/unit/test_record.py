"""The record: its keys, how it is written, and what happens to values that JSON does not have."""

import errno
import json
import math
from pathlib import Path

import pytest
import torch

from experiments.harness import record as record_module
from experiments.harness.record import Record, git_state, plain

REQUIRED = {"schema", "experiment", "started", "wall_s", "host", "versions", "config", "rows"}


def read(record: Record) -> dict[str, object]:
    values: dict[str, object] = json.loads(record.path.read_text(encoding="utf-8"))
    return values


def test_a_record_exists_from_the_start_with_the_required_keys(tmp_path: Path) -> None:
    record = Record(tmp_path / "new" / "folder", "compare", {"seed": 1})
    values = read(record)
    assert set(values) >= REQUIRED
    assert values["config"] == {"seed": 1}
    assert values["rows"] == []
    assert set(values["host"]) == {"cpu", "cores", "memory_bytes", "accelerator"}  # type: ignore[call-overload]
    assert {"python", "torch", "transformers"} <= set(values["versions"])  # type: ignore[call-overload]


def test_rows_are_on_disk_as_soon_as_they_are_added_and_again_when_filled(tmp_path: Path) -> None:
    record = Record(tmp_path, "compare", {})
    row: dict[str, object] = {"label": "none"}
    record.add_row(row)
    assert read(record)["rows"] == [{"label": "none"}]
    row["accuracy"] = {"perplexity": 2.0}
    record.save()
    assert read(record)["rows"] == [{"label": "none", "accuracy": {"perplexity": 2.0}}]


def test_a_failed_write_leaves_the_old_record_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path, "compare", {})
    before = record.path.read_text(encoding="utf-8")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_module.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        record.set("model", {})
    assert record.path.read_text(encoding="utf-8") == before


def test_values_json_does_not_know_become_text_or_numbers() -> None:
    given = {"t": torch.tensor(1.5), "n": math.nan, "i": math.inf, "p": Path("a"), "d": torch.float16, "s": (1, 2), 3: True}
    assert plain(given) == {"t": 1.5, "n": "nan", "i": "inf", "p": "a", "d": "torch.float16", "s": [1, 2], "3": True}


def test_git_is_absent_outside_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "_ROOT", tmp_path)
    assert git_state() is None
    assert "git" not in read(Record(tmp_path / "run", "compare", {}))


def test_git_is_absent_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_state() is None
