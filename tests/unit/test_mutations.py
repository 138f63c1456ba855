"""The list of mutations fits the present tree, and a survivor, a stale entry and a test that fails anyhow are told apart."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import mutations as script
from tests.mutations import ROOT, Mutation, Stale, mutations, rows_of, try_all, write

LIST = mutations()
ADD = Mutation("a sum is a difference", "ours.py", "a + b", "a - b", ("test_ours.py",))


def test_every_old_text_occurs_exactly_once_and_every_test_file_exists() -> None:
    for mutation in LIST:
        mutation.apply(ROOT)
    assert len({m.breaks for m in LIST}) == len(LIST) >= 40


def test_the_table_has_a_row_for_every_mutation_and_each_was_noticed() -> None:
    """Otherwise: python -m tests.mutations --write."""
    rows = rows_of(script.README.read_text(encoding="utf-8"))
    assert list(rows) == [m.breaks for m in LIST]
    for name, row in rows.items():
        assert "**none**" not in row, f"no test notices that {name}"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product of one function and its test, instead of this one."""
    (tmp_path / "ours.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_ours.py").write_text("from ours import add\n\n\ndef test_add():\n    assert add(2, 1) == 3\n")

    def copy(target: Path) -> None:
        target.mkdir(parents=True)
        for file in tmp_path.glob("*.py"):
            (target / file.name).write_text(file.read_text())

    monkeypatch.setattr(script, "copy_tree", copy)
    monkeypatch.setattr(script, "PYTEST", ("-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"))
    return tmp_path


def test_what_notices_and_what_survives_is_found_and_the_original_is_left_alone(tree: Path, tmp_path: Path) -> None:
    survivor = replace(ADD, breaks="the arguments are swapped", new="b + a")
    before = (tree / "ours.py").read_text()
    assert try_all([ADD, survivor], tmp_path / "work", jobs=1) == {ADD: "test_ours.py::test_add", survivor: None}
    assert (tree / "ours.py").read_text() == before


def test_a_mutation_that_does_not_run_and_a_test_that_fails_anyhow_are_errors(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="'it does not import': pytest ended with status 2"):
        try_all([replace(ADD, breaks="it does not import", new="a +")], tmp_path / "first", jobs=1)
    (tree / "test_ours.py").write_text("def test_never():\n    assert False\n")
    with pytest.raises(RuntimeError, match="must pass when nothing is broken"):
        try_all([ADD], tmp_path / "second", jobs=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "a - b"}, "occurs 0 times in ours.py"),
        ({"old": "a"}, "occurs 3 times in ours.py"),
        ({"new": "a + b"}, "differ from the new text"),
        ({"file": "gone.py"}, "occurs 0 times in gone.py"),
        ({"tests": ("test_ours.py", "test_gone.py::test_it")}, "there is no test_gone.py::test_it"),
    ],
)
def test_a_stale_entry_is_named_with_what_is_wrong(tree: Path, change: dict, message: str) -> None:
    with pytest.raises(Stale, match=message) as error:
        replace(ADD, **change).apply(tree)
    assert "'a sum is a difference'" in str(error.value)


def test_the_table_is_renewed_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, gone = replace(ADD, breaks="another"), replace(ADD, breaks="no longer listed")
    monkeypatch.setattr(script, "README", tmp_path / "README.md")
    monkeypatch.setattr(script, "mutations", lambda: [ADD, other, gone])
    script.README.write_text(f"before\n\n{script.START}\n\n{script.END}\n\nafter\n")
    write({other: None, gone: "tests/unit/test_x.py::test_it"})
    monkeypatch.setattr(script, "mutations", lambda: [ADD, other])
    write({ADD: "tests/unit/test_x.py::test_it"})
    text = script.README.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert rows_of(text) == {
        "a sum is a difference": "| a sum is a difference | `ours.py` | `test_it` in [test_x.py](unit/test_x.py) |",
        "another": "| another | `ours.py` | **none** |",
    }
