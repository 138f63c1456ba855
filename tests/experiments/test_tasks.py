"""The tasks of conf/tasks, through lm-eval itself: documents as promised, scores that can show a loss, errors for people."""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'qkv[eval]'")
if importlib.util.find_spec("inspect_evals") is None:  # importorskip would import it, which no code of ours does
    pytest.skip("needs the text of inspect-evals: pip install --no-deps inspect-evals", allow_module_level=True)

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from experiments import run
from experiments.harness import cli
from experiments.tasks import custom, dialogue, tool_call
from qkv.errors import ConfigError

TASKS = Path(__file__).parents[2] / "conf" / "tasks"
NAMES = ["conversation", "last_word", "long_text", "next_passage", "tool_call"]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def manager(**metadata: Any) -> TaskManager:
    return TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)


def load(name: str, **metadata: Any) -> Any:
    return manager(**metadata).load([name])["tasks"][name]


class Oracle(LM):
    """A model that answers what the request's document says is right or, with `wrong`, always something else."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.wrong = wrong

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        out = []
        for request in requests:
            doc, continuation = request.doc, request.args[1].strip()
            right = doc["word"] if "word" in doc else doc["choices"][doc["answer"]]
            assert request.args[1].startswith(" ")  # a word of its own, not the end of the one before
            good = (continuation == right) != self.wrong
            out.append((-1.0 if good else -90.0, good))
        return out

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        return [-float(len(request.args[0])) for request in requests]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        docs = [request.doc for request in requests]
        right = [" " + (d.get("call") or d.get("value") or d.get("reference") or ", ".join(d["outputs"])) for d in docs]
        return ["nothing" for _ in right] if self.wrong else right


def evaluate(names: list[str], model: LM, limit: int, **metadata: Any) -> dict[str, Any]:
    results = simple_evaluate(model, tasks=names, task_manager=manager(**metadata), limit=limit, bootstrap_iters=0)
    return dict(results["results"])


def test_every_file_is_a_task_of_its_own() -> None:
    tasks = manager().all_tasks
    assert set(tasks) == {file.stem for file in TASKS.glob("*.yaml")}


def test_two_hundred_documents_each_and_the_same_every_time() -> None:
    from experiments.tasks import reading, text

    for name in NAMES:
        docs = list(load(name).test_docs())
        assert len(docs) == 200, name
        assert len({json.dumps(doc, sort_keys=True) for doc in docs}) > 190, name
        assert docs == list(load(name).test_docs()), name
    first = list(reading.next_passage()["test"])
    text.documents.cache_clear()
    assert first == list(reading.next_passage()["test"])


def test_right_answers_score_all_and_wrong_ones_nothing() -> None:
    best, worst = (evaluate(NAMES, Oracle(wrong), 20) for wrong in (False, True))
    for name, metric in (("next_passage", "acc"), ("last_word", "acc"), ("conversation", "right"), ("tool_call", "call")):
        assert best[name][f"{metric},none"] == 1.0, name
        assert worst[name][f"{metric},none"] == 0.0, name
    assert best["long_text"]["byte_perplexity,none"] == pytest.approx(2.718, abs=0.05)


def test_what_is_asked_for_can_be_known_from_reading() -> None:
    for doc in load("last_word").test_docs():
        assert doc["word"] in doc["context"].split()
        assert doc["word"] not in doc["context"].split()[-15:]
    for doc in load("conversation").test_docs():
        assert doc["value"] in doc["transcript"]
        assert doc["transcript"].count("\nCustomer:") >= 8
    answers = [doc["answer"] for doc in load("next_passage").test_docs()]
    assert all(30 <= answers.count(i) <= 70 for i in range(4))
    for doc in load("next_passage").test_docs():
        assert len(set(doc["choices"])) == 4


def test_the_questions_of_a_conversation_share_its_beginning() -> None:
    docs = list(load("conversation", samples=8).test_docs())
    for group in (docs[:4], docs[4:]):
        bodies = {doc["transcript"].rsplit("\n", 2)[0] for doc in group}
        assert len(bodies) == 1
        assert len({doc["value"] for doc in group}) == 4


def test_settings_change_the_documents() -> None:
    assert all(len(doc["page"]) == 500 for doc in load("long_text", chars=500, samples=7).test_docs())
    assert len(list(load("long_text", samples=7).test_docs())) == 7
    short, long = (len(load("conversation", samples=1, turns=n).test_docs()[0]["transcript"]) for n in (0, 6))
    assert long > 4 * short
    with pytest.raises(ConfigError, match=r"metadata.samples: must be a whole number, at least 1, got 'many'"):
        load("last_word", samples="many")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"tool": "transfer", "arguments": {"amount": 5}}', (1, 1, 1)),
        (' {"arguments": {"amount": 5}, "tool": "transfer"}\nmore', (1, 1, 1)),
        ('{"tool": "transfer", "arguments": {"amount": "5"}}', (1, 1, 0)),
        ('{"tool": "send", "arguments": {"amount": 5}}', (1, 0, 0)),
        ('{"tool": "transfer", "arguments": {"amount": 5}', (0, 0, 0)),
        ('["transfer"]', (0, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_tool_calls_are_scored_in_three_steps(answer: str, expected: tuple[int, int, int]) -> None:
    scores = tool_call.score({"call": '{"tool": "transfer", "arguments": {"amount": 5}}'}, [answer])
    assert (scores["parses"], scores["tool"], scores["call"]) == expected


def test_a_conversation_answer_must_begin_with_the_value() -> None:
    assert dialogue.score({"value": "Lima"}, [" lima, Peru"]) == {"right": 1.0}
    assert dialogue.score({"value": "48213"}, [" 4821"]) == {"right": 0.0}


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return path


CHOICE = {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}


def test_your_own_lines_become_a_task(tmp_path: Path) -> None:
    files = {
        "acc": write(tmp_path / "a.jsonl", CHOICE, b"", CHOICE | {"question": "5 - 2 =", "answer": 0, "extra": 1}),
        "exact": write(tmp_path / "b.jsonl", {"prompt": "Say yes.", "reference": "yes"}),
        "word_perplexity": write(tmp_path / "c.jsonl", b"\xef\xbb\xbf" + b'{"text": "Some text."}', {"text": "More, caf\u00e9."}),
    }
    for metric, path in files.items():
        results = evaluate(["custom"], Oracle(), 10, custom={"path": str(path)})["custom"]
        assert f"{metric},none" in results
        if metric != "word_perplexity":
            assert results[f"{metric},none"] == 1.0
    assert load("custom", custom={"path": str(files["exact"])}).config.generation_kwargs["until"] == ["\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', r"line 2 is not UTF-8 \(byte 0xe9 at 14\)"),
        (b'{"question": ', "line 2 is not JSON"),
        (b"[1, 2]", "line 2 needs the keys question, choices, answer, or prompt, reference, or text"),
        ({"question": "q"}, "line 2 needs the keys"),
        ({"text": "other kind"}, "line 2 has text where the first line has question, choices, answer"),
        (CHOICE | {"answer": 2}, "line 2 has the answer 2, which is no index of 2 choices"),
        (CHOICE | {"answer": "4"}, "line 2 has the answer '4'"),
        (CHOICE | {"choices": ["3", " "]}, "line 2 needs two or more choices, none of them empty"),
        (CHOICE | {"question": ""}, "line 2 has an empty question"),
    ],
)
def test_unusable_lines_are_named(line: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", CHOICE, line)
    with pytest.raises(ConfigError, match=message):
        custom.read(path)


def test_bad_files_are_refused_before_anything_is_scored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"12 unusable lines: line 1 is not JSON; .*; and 7 more"):
        custom.read(write(tmp_path / "bad.jsonl", *[b"{"] * 12))
    with pytest.raises(ConfigError, match="is empty"):
        custom.read(write(tmp_path / "empty.jsonl", b""))
    with pytest.raises(ConfigError, match="is not a file"):
        load("custom", custom={"path": str(tmp_path / "none.jsonl")})
    with pytest.raises(ConfigError, match=r"task.custom.path is needed"):
        load("custom")
    with pytest.raises(ConfigError, match="has an empty reference"):
        custom.read(write(tmp_path / "answers.jsonl", {"prompt": "p", "reference": ""}))


def test_tasks_on_the_command_line_are_no_hydra_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.tasks_apart(["tasks=[a,b]", "x.tasks=1", "-m"]) == ["+task.names=[a,b]", "x.tasks=1", "-m"]
    assert cli.tasks_back({"tasks": ["c"], "task": {"n": 1, "names": ["a"]}}) == {"tasks": ["a"], "task": {"n": 1}}
    assert "tasks" not in cli.groups(run.CONF)
    assert run.main(["experiment=compare", "tasks=[a,b]", f"hydra.run.dir={tmp_path}"]) == 2
    assert "unknown key 'tasks'" in capsys.readouterr().err


class Words:
    """A tokenizer that counts words."""

    def __call__(self, text: str) -> Any:
        return type("Encoded", (), {"input_ids": text.split()})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ruler_fwe"])
def test_ruler_needs_no_network_and_keeps_its_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("wonderwords", "nltk", "scipy"):
        pytest.importorskip(package)
    import socket

    def refused(*_: Any) -> None:
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    settings = {"tokenizer": Words(), "samples": 3, "max_seq_lengths": [800, 1000]}
    docs = list(load(name, **settings).test_docs())
    assert [doc["max_length"] for doc in docs][::3] == ([800, 1000] if name != "ruler_fwe" else [750, 950])
    assert all(doc["length"] <= doc["max_length"] + 50 for doc in docs)
    assert docs == list(load(name, **settings).test_docs())
    assert evaluate([name], Oracle(), 3, **settings)[name]["score,none"] == 1.0
    assert evaluate([name], Oracle(wrong=True), 3, **settings)[name]["score,none"] == 0.0


def test_ruler_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="add --metadata"):
        load("niah_single_1")
    with pytest.raises(ConfigError, match="must be a list of whole numbers, at least 768, got \\[100\\]"):
        load("niah_single_1", tokenizer=Words(), max_seq_lengths=[100])
