"""Loggers: what they write, and that one that fails costs a warning and nothing else."""

import builtins
import json
import logging
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.harness.loggers.base import LOGGERS, Logger
from experiments.harness.plots import bars
from experiments.harness.record import flatten
from experiments.harness.table import number

ROWS: list[dict[str, Any]] = [
    {"label": "none", "memory": {"pool_bytes": 8}, "accuracy": {"kl_divergence": 0.0}},
    {"label": "int8", "memory": {"pool_bytes": 4}, "outputs": [{"text": "a"}]},
]


def log_everything(logger: Logger, folder: Path) -> None:
    record = folder / "record.json"
    record.write_text("{}", encoding="utf-8")
    plot = bars(folder / "bars.png", ["none", "int8"], {"bytes": [8, 4], "KL": [0.0, None]}, "title")
    (folder / "given.safetensors").write_bytes(b"scales")
    config = {"seed": 0, "model": {"name": "tiny"}, "scales": str(folder / "given.safetensors")}
    logger.start(folder, "compare", config)
    for row in ROWS:
        for seconds in (0.5, 1.0):
            logger.sample(row["label"], {"seconds": seconds, "pool": seconds / 4})
        logger.row(row)
    logger.finish(record, [plot])


def test_nested_rows_flatten_with_slashes() -> None:
    assert flatten(ROWS[0]) == {"label": "none", "memory/pool_bytes": 8, "accuracy/kl_divergence": 0.0}


def test_jsonl_writes_one_line_per_row(tmp_path: Path) -> None:
    log_everything(LOGGERS.build("jsonl"), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [flatten(row) for row in ROWS]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert samples[1] == {"label": "none", "seconds": 1.0, "pool": 0.25}
    assert len(samples) == 4


def test_none_writes_nothing(tmp_path: Path) -> None:
    log_everything(LOGGERS.build("none"), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bars.png", "given.safetensors", "record.json"]


def test_wandb_offline_with_the_real_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with caplog.at_level(logging.WARNING, logger="experiments.harness.loggers"):
        log_everything(LOGGERS.build("wandb"), tmp_path)
    assert not [r for r in caplog.records if r.name == "experiments.harness.loggers"]
    (transaction_log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # wandb's own process writes the file, a moment after finish() returned
    while not (written := read_back(transaction_log)).get("exit"):
        assert time.monotonic() < deadline, sorted(written)
        time.sleep(0.1)
    assert written["config"]["model"]["value"] == {"name": "tiny"}
    history = written["history"]
    assert [row["memory/pool_bytes"] for row in history if "memory/pool_bytes" in row] == [8, 4]
    assert [row["int8/pool"] for row in history if "int8/pool" in row] == [0.125, 0.25]
    assert any(key.split("/")[0] == "rows" for row in history for key in row)
    assert {name.partition("-")[0] for name in written["artifact"]} >= {"record", "scales"}
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/bars*.png"))
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rows*.json")
    assert json.loads(table.read_text())["data"][1][0] == "int8"


def read_back(file: Path) -> dict[str, Any]:
    """What an offline run left for `wandb sync`: config, history (a row per log call), artifact names, whether it ended."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    found: dict[str, Any] = {"config": {}, "history": [], "artifact": []}
    for data in log_entries(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["config"] |= {item.key: {"value": json.loads(item.value_json)} for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            found["history"].append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif kind == "artifact":
            found["artifact"].append(record.artifact.name)
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            found["artifact"].append(record.request.log_artifact.artifact.name)
        elif kind == "exit":
            found["exit"] = True
    return found


def log_entries(data: bytes) -> Iterator[bytes]:
    """Of a log in LevelDB's format, after wandb's 7 bytes of header: blocks of 32 KiB that hold pieces of entries, each with a
    checksum, its length and whether it is all of the entry (1), its beginning (2), middle (3) or end (4)."""
    at, entry = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""


def test_wandb_online_without_a_login_is_one_line_and_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    log_everything(LOGGERS.build({"name": "wandb", "mode": "online"}), tmp_path)
    assert caplog.text.count("nobody is logged in") == 1
    assert "the run goes on without it" in caplog.text


def test_tensorboard_holds_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_everything(LOGGERS.build("tensorboard"), tmp_path)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.value for event in found.Scalars("memory/pool_bytes")] == [8, 4]


def test_without_the_wandb_package_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = builtins.__import__

    def without_wandb(name: str, *rest: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    log_everything(LOGGERS.build("wandb"), tmp_path)
    assert caplog.text.count("the run goes on without it") == 1


def test_a_sink_that_fails_in_the_middle_is_dropped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, _: object) -> None:
            raise ConnectionError("no route to host\nand more")

    logger: Any = LOGGERS.build("wandb")
    logger._run = Broken()
    for row in ROWS:
        logger.row(row)
    logger.finish(tmp_path / "record.json", [])
    assert caplog.text.count("no route to host; the run goes on without it") == 1


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234, "1,234"), (0.5, "0.5"), ("x", "x"), (float("nan"), "nan"), (1234567.0, "1,234,567.0")]
)
def test_numbers_for_people(value: float | str | None, text: str) -> None:
    assert number(value) == text
    assert number(1.234, 2, signed=True, suffix=" %") == "+1.23 %"
