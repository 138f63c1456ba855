"""One bad request: refused or clamped at the door, in one line, and nobody else notices."""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from qkv.engine import Engine
from qkv.errors import ConfigError, QkvError, RequestError
from qkv.types import SamplingParams
from tests.engine.support import make, tokens
from tests.engine.tiny_models import VOCAB

GOOD = SamplingParams(max_tokens=4, ignore_eos=True)


class Words:
    """A tokenizer of words w0, w1, ..., with special tokens, in the shape of Hugging Face's."""

    eos_token_id = 2

    class Added(str):
        special = True

    added_tokens_decoder = {1: Added("<begin>"), 7: Added("<tool>")}  # noqa: RUF012

    def __call__(self, text: str) -> dict[str, list[int]]:
        text.encode()  # like a fast tokenizer, which takes whole characters only
        return {"input_ids": [3 + len(word) for word in text.split()]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" w{t}" for t in token_ids if not (skip_special_tokens and t in self.added_tokens_decoder))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make(tokenizer=Words()) as made:
        yield made


BAD_PROMPTS: dict[str, Any] = {
    "empty list": [],
    "empty text": "",
    "only spaces": "   ",
    "half of a surrogate pair": "a \ud800 b",
    "outside the vocabulary": [3, VOCAB],
    "negative": [-1],
    "far outside": [10**30],
    "bool": [True, False],
    "float": [3.0, 4.0],
    "text ids": ["3", "4"],
    "none": None,
    "a number": 5,
    "none inside": [3, None],
    "bytes": b"abc",
    "a set": {3, 4},
    "a dict": {"input_ids": [3, 4]},
    "nested": [[3, 4]],
    "float tensor": torch.tensor([3.0, 4.0]),
    "bool tensor": torch.tensor([True, False]),
    "two-dimensional tensor": torch.tensor([[3, 4]]),
    "float array": np.array([3.0]),
    "an object": object(),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_in_one_line_and_its_neighbours_finish(engine: Engine, kind: str) -> None:
    expected = engine.generate([tokens(0, 9)], GOOD)[0].token_ids
    before, bad, after = engine.generate([tokens(0, 9), BAD_PROMPTS[kind], tokens(0, 9)], GOOD)
    assert bad.finish_reason == "error"
    assert bad.error
    assert "\n" not in bad.error
    assert len(bad.error) < 250
    assert before.token_ids == after.token_ids == expected
    with pytest.raises(RequestError):
        engine.add_request(BAD_PROMPTS[kind])
    with pytest.raises(RequestError):
        engine.score([BAD_PROMPTS[kind]])
    engine.check()


GOOD_PROMPTS: dict[str, Any] = {
    "tuple": (3, 4, 5),
    "range": range(3, 6),
    "numpy": np.array([3, 4, 5], dtype=np.int32),
    "numpy integers in a list": [np.int64(3), np.int32(4), np.uint8(5)],
    "tensor": torch.tensor([3, 4, 5]),
    "tensors in a list": [torch.tensor(3), torch.tensor(4), torch.tensor(5)],
    "array": array("q", [3, 4, 5]),
    "generator": iter([3, 4, 5]),
}


@pytest.mark.parametrize("kind", GOOD_PROMPTS)
def test_whole_numbers_of_any_type_are_token_ids(engine: Engine, kind: str) -> None:
    (out,) = engine.generate([GOOD_PROMPTS[kind]], GOOD)
    assert out.prompt_token_ids == [3, 4, 5]
    assert all(type(t) is int for t in out.prompt_token_ids)


BAD_PARAMS: list[dict[str, Any]] = [
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": -1.0},
    {"temperature": 10**400},
    {"temperature": "hot"},
    {"temperature": True},
    {"temperature": torch.tensor(1.0)},
    {"top_k": -1},
    {"top_k": 1.5},
    {"top_k": True},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_p": float("nan")},
    {"min_p": 1.0},
    {"min_p": -0.1},
    {"min_p": float("nan")},
    {"seed": 1.5},
    {"seed": "x"},
    {"max_tokens": 0},
    {"max_tokens": -(10**30)},
    {"max_tokens": 2.0},
    {"logprobs": -1},
    {"logprobs": 101},
    {"logprobs": True},
    {"stop": 5},
    {"stop": [""]},
    {"stop": ""},
    {"stop": [5]},
    {"stop": {"a": 1}},
    {"stop_token_ids": 5},
    {"stop_token_ids": ["x"]},
    {"stop_token_ids": [1.5]},
    {"ignore_eos": "yes"},
    {"priority": 1.5},
    {"priority": None},
]


@pytest.mark.parametrize("bad", BAD_PARAMS, ids=lambda bad: str(bad)[:40])
def test_bad_sampling_parameters_are_refused_when_they_are_made(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**bad)
    assert next(iter(bad)) in str(caught.value)
    assert "\n" not in str(caught.value)


EXTREME: list[dict[str, Any]] = [
    {"temperature": 5e-324},
    {"temperature": 1e-46},
    {"temperature": 1e-38},
    {"temperature": 1e308},
    {"temperature": 1.0, "top_k": 10**30},
    {"temperature": 1.0, "top_p": 5e-324},
    {"temperature": 1.0, "min_p": 1 - 1e-16},
    {"temperature": 1.0, "seed": -(10**40)},
    {"temperature": 1.0, "seed": 10**40},
    {"logprobs": 100},
    {"priority": 10**30},
    {"priority": -(10**30)},
    {"stop": ["x" * 300_000]},
    {"stop": ["\ud800"]},
    {"stop": [f"never {i}" for i in range(1000)]},
    {"stop_token_ids": [10**30, -5]},
    {"stop_token_ids": list(range(1000, 3000))},
]


@pytest.mark.parametrize("extreme", EXTREME, ids=lambda e: str(e)[:40])
def test_extreme_sampling_parameters_are_served(engine: Engine, extreme: dict[str, Any]) -> None:
    expected = engine.generate([tokens(0, 9)], GOOD)[0].token_ids
    params = SamplingParams(**({"max_tokens": 4, "ignore_eos": True} | extreme))
    outs = engine.generate([tokens(0, 9)] * 3, [GOOD, params, GOOD])
    assert [o.finish_reason for o in outs] == ["length"] * 3
    assert outs[0].token_ids == outs[2].token_ids == expected
    if extreme.get("temperature", 1) < 1e-30:
        assert outs[1].token_ids == expected, "a tiny temperature is greedy"
    engine.check()


def test_more_alternatives_than_the_vocabulary_has_are_all_of_it() -> None:
    from tests.engine.tiny_models import tiny_model

    with Engine.create(tiny_model("llama", vocab_size=50), num_blocks=64) as small:
        outs = small.generate([[5, 6, 7], [8, 9]], [SamplingParams(max_tokens=3, logprobs=60, ignore_eos=True), GOOD])
        assert [o.finish_reason for o in outs] == ["length", "length"]
        assert outs[0].logprobs is not None
        assert all(len(lp.top) == 50 for lp in outs[0].logprobs)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "greedy", 5, [None, "x"]], ids=str)
def test_what_is_no_sampling_parameters_is_refused(engine: Engine, params: Any) -> None:
    try:
        message = engine.generate([tokens(0, 9)], params)[0].error
    except QkvError as error:
        message = str(error)
    assert "sampling parameters" in (message or "")
    assert not engine.has_work


@pytest.mark.parametrize("salt", [None, 5, b"x", "\ud800", ["x"]])
def test_a_salt_that_cannot_be_hashed_is_refused_at_the_door(engine: Engine, salt: Any) -> None:
    with pytest.raises(RequestError, match="salt="):
        engine.add_request(tokens(0, 9), salt=salt)


@pytest.mark.parametrize("arrival", ["now", float("nan"), float("inf"), True, [1.0]])
def test_an_arrival_that_is_no_time_is_refused(engine: Engine, arrival: Any) -> None:
    with pytest.raises(RequestError, match="arrival="):
        engine.add_request(tokens(0, 9), arrival=arrival)


@pytest.mark.parametrize("bad", [None, "3", 1.5, [3]])
def test_abort_takes_an_id(engine: Engine, bad: Any) -> None:
    with pytest.raises(RequestError, match="abort takes a request's id"):
        engine.abort(bad)
    engine.abort(10**30)  # nobody's
    engine.generate([tokens(0, 9)], GOOD)


@pytest.mark.parametrize("first", [0, 1.5, "1", None, True, [1, 1], 9, -1])
def test_the_first_token_to_score_is_checked(engine: Engine, first: Any) -> None:
    with pytest.raises(QkvError, match="first"):
        engine.score([tokens(0, 9)], first=first)
    assert not engine.has_work
    assert len(engine.score([tokens(0, 9)], first=[np.int64(3)])[0].logprobs) == 6  # type: ignore[list-item]


def test_prompts_that_are_no_list_and_callbacks_that_are_no_functions_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="prompts are a list"):
        engine.generate(5, GOOD)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_logits=5"):
        engine.score([tokens(0, 9)], on_logits=5)  # type: ignore[arg-type]
    (score,) = engine.score("aaa bbb cc d")
    assert len(score.logprobs) == 3


def test_too_many_stop_strings_are_refused(engine: Engine) -> None:
    (out,) = engine.generate([tokens(0, 9)], SamplingParams(stop=tuple(f"x{i}" for i in range(1001))))
    assert out.error == "1001 stop strings are given; a request may have 1000"


def test_a_tokenizer_that_raises_refuses_the_prompt(engine: Engine) -> None:
    (out,) = engine.generate(["a \udfff"], GOOD)
    assert out.error == "the tokenizer cannot encode the prompt 'a \\udfff': it holds half of a surrogate pair"
