"""lm-eval on the engine gives what lm-eval's own `hf` model gives, in every order, batch and cache state."""

import itertools
import json
import logging
import random
import sys
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'qkv[eval]')")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.tasks import TaskManager

from experiments.lm import settings
from experiments.lm.__main__ import main
from experiments.lm.model import QkvLM, Truncation
from experiments.lm.waves import Job, rounds
from qkv.engine import Engine
from qkv.errors import ConfigError, RequestError
from qkv.models import load_model, wrap_model
from tests.experiments.lm_support import QUESTIONS, TASKS, chat_tokenizer, save_tiny, task_folder, tiny

__all__ = ["task_folder"]

PAIRS = [(f"Question: {q['q']}\nAnswer:", f" {c}") for q in QUESTIONS for c in q["choices"]]  # type: ignore[attr-defined]


def engine(**settings: Any) -> Engine:
    defaults: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 16, "deterministic": True}
    return Engine.create(wrap_model(tiny(), chat_tokenizer()), **(defaults | settings))


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]


def evaluate(lm: Any, folder: Path, **settings: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    out = lm_eval.simple_evaluate(lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **settings)
    assert out is not None
    return dict(out)


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Log-likelihoods within 1e-3, the same predictions, texts and metrics."""
    for task in TASKS:
        for a, b in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert a["arguments"] == b["arguments"]
            for (x,), (y,) in zip(a["resps"], b["resps"], strict=True):
                match x:
                    case str():
                        assert x == y
                    case float():
                        assert x == pytest.approx(y, abs=1e-3)
                    case _:
                        assert x[0] == pytest.approx(y[0], abs=1e-3)
                        assert x[1] == y[1]
        for metric, value in theirs["results"][task].items():
            assert ours["results"][task][metric] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


@pytest.mark.parametrize("chat", [False, True])
def test_results_are_those_of_lm_evals_hf_model(task_folder: Path, chat: bool) -> None:
    from lm_eval.models.huggingface import HFLM

    hf: Any = HFLM(pretrained=tiny(), tokenizer=chat_tokenizer(), batch_size=4, device="cpu", max_length=256)
    theirs = evaluate(hf, task_folder, apply_chat_template=chat, num_fewshot=None)
    with engine() as e:
        equal(evaluate(QkvLM(e), task_folder, apply_chat_template=chat), theirs)
        assert e.metrics()["cache"]["hit_rate"] > 0.2


@pytest.mark.slow
def test_results_are_those_of_lm_evals_hf_model_on_smollm2(task_folder: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    loaded = load_model("smollm2")
    theirs = evaluate(HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4, device="cpu"), task_folder)
    with Engine.create(loaded, num_blocks=1000) as e:
        equal(evaluate(QkvLM(e), task_folder), theirs)


@pytest.mark.parametrize("quantizer", ["none", "fp8", "int8_token", {"name": "kivi"}])
def test_scores_do_not_depend_on_order_batch_chunks_or_a_warm_cache(quantizer: Any) -> None:
    """Deterministic mode: bit for bit."""
    requests = instances("loglikelihood", PAIRS)
    with engine(quantizer=quantizer) as e:
        lm = QkvLM(e)
        expected = lm.loglikelihood(requests)
        assert lm.loglikelihood(requests) == expected, "a warm prefix cache changed a score"
        shuffled = list(enumerate(requests))
        random.Random(1).shuffle(shuffled)
        assert lm.loglikelihood([r for _, r in shuffled]) == [expected[i] for i, _ in shuffled]
        assert [lm.loglikelihood([r])[0] for r in requests[:6]] == expected[:6]
    for changed in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 16, "max_num_scored_tokens": 3}, {"num_blocks": 20}):
        with engine(quantizer=quantizer, **changed) as e:
            assert QkvLM(e).loglikelihood(requests) == expected, changed
    with engine(quantizer=quantizer, enable_prefix_caching=False) as e:
        assert QkvLM(e).loglikelihood(requests) == expected, "the prefix cache changed a score"


def test_a_context_is_prefilled_once_for_all_its_answers() -> None:
    context = "This is a long context that several answers share, and it is only computed once. " * 2
    pairs = [(context, answer) for answer in ("yes", "no", "perhaps", "never", "today", "x", "y", "z")]
    with engine() as e:
        lm = QkvLM(e)
        lm.loglikelihood(instances("loglikelihood", pairs))
        computed, whole = e.metrics()["tokens"]["prefill"], sum(len(c) + len(a) - 1 for c, a in pairs)
        assert computed < len(context) + 8 * (16 + 8)
        assert computed < whole / 4
        one_token = 3 * [lm.engine.recorder.requests_finished["length"]]
        assert one_token == [6, 6, 6], "answers of one token are one forward"


def test_a_sequence_comes_after_those_whose_blocks_it_begins_with() -> None:
    rng = random.Random(0)
    stems = [[rng.randrange(9) for _ in range(20)] for _ in range(3)]
    jobs = [Job(rng.choice(stems) + [rng.randrange(9) for _ in range(rng.randrange(1, 12))], i) for i in range(40)]
    for pool_tokens in (10_000, 80):
        seen: list[Job] = []
        for wave in itertools.chain.from_iterable(rounds(jobs, 4, pool_tokens)):
            assert wave
            beginnings = [tuple(job.tokens[:20]) for job in wave]
            assert len(set(beginnings)) == len(beginnings) or all(
                tuple(b) in {tuple(j.tokens[:20]) for j in seen} for b in beginnings
            )
            seen += wave
        assert sorted(map(id, seen)) == sorted(map(id, jobs))


def test_what_does_not_fit_is_cut_from_the_left_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    long = "x" * 300 + "The end of a long text, and"
    with engine() as e, caplog.at_level(logging.WARNING):
        lm = QkvLM(e)
        (score,) = lm.loglikelihood(instances("loglikelihood", [(long, " more")]))
        kept = 256 + 1 - len(" more")
        assert score == lm.loglikelihood(instances("loglikelihood", [(long[-kept:], " more")]))[0]
        assert lm.truncated == Truncation(1, len(long) - kept)
        assert "1 requests were longer than 256 tokens" in caplog.text
        text = lm.generate_until(instances("generate_until", [(long, {"until": ["\n"], "max_gen_toks": 6})]))
        assert text == lm.generate_until(instances("generate_until", [(long[-250:], {"until": ["\n"], "max_gen_toks": 6})]))
        rolling = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(long,)]))
        assert rolling[0] < 0
        assert lm.truncated.requests == 2, "a rolling window is no truncation"


def test_bad_requests_say_what_is_wrong() -> None:
    with engine() as e:
        lm = QkvLM(e)
        with pytest.raises(RequestError, match="the answer after 'Is it\\?' is empty"):
            lm.loglikelihood(instances("loglikelihood", [("Is it?", " yes"), ("Is it?", "")]))
        with pytest.raises(RequestError, match="an answer of 300 tokens does not fit"):
            lm.loglikelihood(instances("loglikelihood", [("a", "b" * 300)]))
        with pytest.raises(RequestError, match="'num_beams' is not supported"):
            lm.generate_until(instances("generate_until", [("a", {"until": [], "num_beams": 4})]))
        with pytest.raises(RequestError, match="max_gen_toks=256 leaves no room"):
            lm.generate_until(instances("generate_until", [("a", {"until": []})]))
        e.check()
    with (
        Engine.create(wrap_model(tiny()), num_blocks=20) as without,
        pytest.raises(ConfigError, match="has no tokenizer"),
    ):
        QkvLM(without)


def test_sampling_depends_on_the_seed_and_the_place_only() -> None:
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    requests = instances("generate_until", [(f"Question {i % 2}", options) for i in range(6)])
    with engine() as e, engine(max_num_seqs=2) as other:
        texts = QkvLM(e).generate_until(requests)
        assert texts == QkvLM(e).generate_until(requests) == QkvLM(other).generate_until(requests)
        assert len(set(texts)) > 2, "repeats of a question are drawn anew"


def test_an_answer_cache_is_of_one_quantizer(tmp_path: Path) -> None:
    requests = instances("loglikelihood", PAIRS[:3])
    with engine() as none, engine(quantizer="int8_token") as int8:
        cached = CachingLM(QkvLM(none), str(tmp_path / "answers.db"))
        expected = cached.loglikelihood(requests)
        assert CachingLM(QkvLM(none), str(tmp_path / "answers.db")).loglikelihood(requests) == expected
        with pytest.raises(ConfigError, match=r"answers of .*name=none.*, not of .*name=int8_token"):
            CachingLM(QkvLM(int8), str(tmp_path / "answers.db"))


def command_line(monkeypatch: pytest.MonkeyPatch, folder: Path, out: Path, model_args: str) -> int:
    # --tasks is given as a file, since a name would make lm-eval read all the tasks that it comes with
    arguments = ["--tasks", str(folder / "toy_choice.yaml"), "--output_path", str(out), "--log_samples", "--limit", "3"]
    monkeypatch.setattr(sys, "argv", ["lm-eval", "--model", "qkv", "--model_args", model_args, *arguments])
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    return main()


def test_lm_evals_command_line_takes_settings_by_their_names(
    task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model")
    model_args = f"model=path,model.path={model},quantizer=kivi,quantizer.bits=2,allocator.block_size=32,cache.num_blocks=50"
    assert command_line(monkeypatch, task_folder, tmp_path, model_args) == 0
    assert "toy_choice" in capsys.readouterr().out
    (results,) = tmp_path.rglob("results_*.json")
    config = json.loads(results.read_text(encoding="utf-8"))["config"]
    assert config["quantizer"] | {"name": "kivi", "bits": 2} == config["quantizer"]
    assert config["attention"]["reads"] == "cache"
    assert 0 < config["fraction_read_from_cache"] < 1
    assert list(tmp_path.rglob("samples_toy_choice_*.jsonl"))


@pytest.mark.parametrize(
    ("model_args", "message"),
    [
        ("model=smollm3", "model_args: unknown model 'smollm3'; did you mean 'smollm2'?"),
        ("quantizer=int9", "model_args: unknown quantizer 'int9'; did you mean 'int8'?"),
        ("quantiser=int8", "model_args: unknown setting 'quantiser'; did you mean 'quantizer'?"),
        ("quantizer=kivi,quantizer.bit=2", "model_args: unknown key 'quantizer.bit'; did you mean 'bits'?"),
    ],
)
def test_lm_evals_command_line_says_what_is_wrong_with_a_setting(
    task_folder: Path,
    tmp_path: Path,
    model_args: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line(monkeypatch, task_folder, tmp_path, model_args) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")


def test_model_args_mean_what_hydra_settings_mean() -> None:
    config, data = settings.read({"model": "llama3-8b-tiny", "quantizer": None, "runner.deterministic": True, "seed": 3})
    assert (config.model.name, config.quantizer, config.runner.deterministic, config.seed) == (
        "llama3-8b-tiny",
        {"name": "none"},
        True,
        3,
    )
    assert data.name == "business"
