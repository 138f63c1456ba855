"""experiment=accuracy at toy size: its record, tables and files, what it refuses, and that nothing finished is run twice."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'qkv[eval]')")

from experiments import accuracy_report, run
from experiments.lm import evaluate
from qkv.errors import RequestError
from qkv.layout import HeadFormat, KVFormat
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.policies.quantizer.none import NoneQuantizer
from tests.experiments.lm_support import save_tiny, task_folder

__all__ = ["task_folder"]


@dataclass
class Identity(NoneQuantizer):
    """Stores keys and values unchanged, like `none` but under another name."""

    name: ClassVar[str] = "identity"


@dataclass
class Broken(AffineQuantizer):
    """2-bit keys with one range per token, which ruin every model (KIVI, table 1)."""

    name: ClassVar[str] = "broken"
    encode_rule: ClassVar[Literal["minmax"]] = "minmax"

    def formats(self, layer: int) -> list[HeadFormat]:
        k = KVFormat(bits=2, storage=torch.uint8, scale="token", zero="float")
        return self.whole(layer, k, KVFormat(bits=8, storage=torch.int8, scale="token"))


@pytest.fixture(autouse=True)
def _policies(monkeypatch: pytest.MonkeyPatch) -> None:
    QUANTIZERS.names()
    for policy in (Identity, Broken):
        monkeypatch.setitem(QUANTIZERS._classes, policy.name, policy)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def command(model: Path, task_folder: Path, folder: Path, *more: str) -> list[str]:
    return [
        "experiment=accuracy",
        "model=path",
        f"model.path={model}",
        "model.dtype=float32",
        "data=pydoc",
        f"task_folders=[{task_folder}]",
        "tasks=[toy_choice,toy_text,toy_generation]",
        "cache.num_blocks=200",
        "documents=2",
        "schedule_documents=1",
        "tokens_per_document=64",
        "calibration_documents=2",
        f"hydra.run.dir={folder}",
        *more,
    ]


def record(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    return loaded


def test_a_run_fills_the_record_and_writes_every_file(
    model: Path, task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantizers = "quantizers=[identity,int8,{name: kivi, bits: 2},broken]"
    assert run.main(command(model, task_folder, tmp_path, quantizers, "runner=deterministic")) == 0
    rows = {row["label"]: row for row in record(tmp_path)["rows"]}
    assert list(rows) == ["none", "identity", "int8", "kivi(bits=2)", "broken"]
    for label, row in rows.items():
        accuracy = row["accuracy"]
        assert {"policy", "memory", "attention"} <= set(row)
        assert accuracy["schedule_kl"] <= 1e-9, "deterministic: no noise between schedules"
        assert set(accuracy["tasks"]) == {"toy_choice", "toy_text", "toy_generation"}
        for task in accuracy["tasks"].values():
            assert {"metric", "value", "stderr", "samples", "fraction_read_from_cache", "read_through_cache"} <= set(task)
            assert task["samples"] == 6
            if label != "none":
                assert {"baseline", "delta", "p_value", "p_adjusted", "minimum_detectable_effect", "verdict"} <= set(task)
    for task in rows["identity"]["accuracy"]["tasks"].values():
        assert (task["lost"], task["gained"], task["answers_changed"], task["delta"], task["p_value"]) == (0, 0, 0, 0.0, 1.0)
    assert rows["identity"]["accuracy"]["kl_divergence"] == 0.0
    broken = rows["broken"]["accuracy"]
    assert broken["kl_divergence"] > rows["int8"]["accuracy"]["kl_divergence"] > 0
    assert broken["tasks"]["toy_text"]["lost"] + broken["tasks"]["toy_text"]["gained"] == 6, "every likelihood moved"
    for label, row in rows.items():
        fractions = [t["fraction_read_from_cache"] for t in row["accuracy"]["tasks"].values()]
        assert all(f < 1 for f in fractions) if label.startswith("kivi") else all(f == 1 for f in fractions)

    out = capsys.readouterr().out
    assert "no sample changed" in out or "too few samples" in out
    page = (tmp_path / "accuracy.html").read_text(encoding="utf-8")
    assert "toy_generation" in page
    assert "http" not in page.replace("https://", "").split("<h2>Settings")[0], "self-contained"
    assert (tmp_path / "frontier.png").stat().st_size > 0
    flips = json.loads((tmp_path / "flips.json").read_text(encoding="utf-8"))
    assert all(flip["quantizer"] != "identity" for flip in flips)
    choices = [row["accuracy"]["tasks"]["toy_choice"] for label, row in rows.items() if label != "none"]
    assert sum(flip["task"] == "toy_choice" for flip in flips) == sum(t["lost"] + t["gained"] for t in choices)
    assert list((tmp_path / "lm_eval").rglob("samples_toy_choice_*.jsonl"))
    assert accuracy_report.main([str(tmp_path), f"out={tmp_path / 'again.html'}"]) == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_wandb_gets_the_tables_and_lm_evals_own_results(
    model: Path, task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_MODE")
    few = ["limit=2", "quantizers=[int8_token]", "logger=wandb", "tasks=[toy_choice,toy_text]"]
    assert run.main(command(model, task_folder, tmp_path, *few)) == 0
    assert "goes on without it" not in capsys.readouterr().err
    tables = {p.name.rsplit("_", 2)[0] for p in tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.json")}
    assert {
        "accuracy",
        "divergence",
        "eval_results",
        "none.toy_choice_eval_results",
        "int8_token.toy_text_eval_results",
    } <= tables
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/frontier*.png"))


def test_a_row_that_is_not_read_through_the_cache_is_marked(model: Path, task_folder: Path, tmp_path: Path) -> None:
    few = ["tasks=[toy_choice]", "limit=3", "quantizers=[int8_token]"]
    assert run.main(command(model, task_folder, tmp_path, *few, "attention=raw")) == 0
    (_, row) = record(tmp_path)["rows"]
    task = row["accuracy"]["tasks"]["toy_choice"]
    assert task["fraction_read_from_cache"] < 1
    assert task["read_through_cache"] is False
    assert task["verdict"].startswith("not read through the cache")


def test_an_interrupted_run_repeats_no_finished_task(
    model: Path, task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["quantizers=[int8_token]", "limit=4"]
    real, ran = evaluate.run, list[str]()

    def interrupted(lm: Any, name: str, *rest: Any) -> Any:
        if len(ran) == 4:
            raise KeyboardInterrupt
        ran.append(name)
        return real(lm, name, *rest)

    monkeypatch.setattr(evaluate, "run", interrupted)
    assert run.main(command(model, task_folder, tmp_path / "one", *settings)) == 130
    assert ran == ["toy_choice", "toy_text", "toy_generation", "toy_choice"]
    assert record(tmp_path / "one")["interrupted"] is True
    assert set(record(tmp_path / "one")["rows"][1]["accuracy"]["tasks"]) == {"toy_choice"}

    ran.clear()
    resumed = [*settings, f"resume={tmp_path / 'one'}"]
    assert run.main(command(model, task_folder, tmp_path / "two", *resumed)) == 0
    assert ran == ["toy_text", "toy_generation"]
    monkeypatch.setattr(evaluate, "run", real)
    assert run.main(command(model, task_folder, tmp_path / "whole", *settings)) == 0

    def outcome(folder: Path) -> list[Any]:
        timed = ("seconds",)
        tasks = [row["accuracy"]["tasks"] for row in record(folder)["rows"]]
        return [{n: {k: v for k, v in t.items() if k not in timed} for n, t in each.items()} for each in tasks]

    assert outcome(tmp_path / "two") == outcome(tmp_path / "whole")
    capsys.readouterr()
    assert run.main(command(model, task_folder, tmp_path / "three", "quantizers=[int8_token]", f"resume={tmp_path / 'one'}")) == 2
    assert "made with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tasks=[toy_choise]"], "unknown task 'toy_choise'; did you mean 'toy_choice' or "),
        (
            ["tasks=[lambada_openai]"],
            "task 'lambada_openai' needs the data set 'EleutherAI/lambada_openai' from the",
        ),
        (["tasks=[toy_choice,toy_choice]"], "tasks: each at most once"),
        (["quantizers=[int9]"], "unknown quantizer 'int9'"),
        (["task_folders=[/nowhere]"], "task_folders: '/nowhere' is not a folder"),
        (["resume=/nowhere"], "resume: '/nowhere' holds no finished tasks"),
        (["tasks=[custom]"], "task.custom.path is needed"),
        (["limit=0"], "limit"),
    ],
)
def test_a_mistake_is_one_message(
    model: Path, task_folder: Path, tmp_path: Path, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(command(model, task_folder, tmp_path, *settings)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1


def test_bad_lines_of_a_users_own_file_are_named(
    model: Path, task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b'{"question": "Is it?", "choices": ["yes", "no"], "answer": 0}\n{"question": "\xff"}\n')
    assert run.main(command(model, task_folder, tmp_path / "run", "tasks=[custom]", f"task.custom.path={file}")) == 2
    assert "line 2 is not UTF-8" in capsys.readouterr().err
    file.write_text('{"question": "Is it?", "choices": ["yes", ""], "answer": 0}\n', encoding="utf-8")
    assert run.main(command(model, task_folder, tmp_path / "run", "tasks=[custom]", f"task.custom.path={file}")) == 2
    assert "line 1" in capsys.readouterr().err


def test_an_error_of_the_model_keeps_what_was_measured(
    model: Path, task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = evaluate.run

    def failing(lm: Any, name: str, *rest: Any) -> Any:
        if name == "toy_text":
            raise RequestError("no room")
        return real(lm, name, *rest)

    monkeypatch.setattr(evaluate, "run", failing)
    assert run.main(command(model, task_folder, tmp_path, "limit=2")) == 1
    assert "error: no room" in capsys.readouterr().err
    assert set(record(tmp_path)["rows"][0]["accuracy"]["tasks"]) == {"toy_choice"}
    assert accuracy_report.main([str(tmp_path)]) == 0


@pytest.mark.slow
def test_two_bit_keys_per_token_are_a_loss_in_every_family_on_smollm2(tmp_path: Path) -> None:
    """Multiple choice, cloze, structured output and perplexity all show the loss, and no sample flips with the identity."""
    tasks = ["next_passage", "last_word", "tool_call", "long_text"]
    settings = [f"tasks=[{','.join(tasks)}]", "limit=40", "documents=1", "schedule_documents=0", "tokens_per_document=256"]
    assert run.main(["experiment=accuracy", "quantizers=[identity,broken]", *settings, f"hydra.run.dir={tmp_path}"]) == 0
    rows = {row["label"]: row["accuracy"]["tasks"] for row in record(tmp_path)["rows"]}
    for name in tasks:
        assert rows["identity"][name]["lost"] == rows["identity"][name]["gained"] == 0
        assert rows["broken"][name]["verdict"].startswith("loss"), (name, rows["broken"][name])
