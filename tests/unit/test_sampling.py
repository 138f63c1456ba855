"""Sampling against the definitions, and text that comes out whole."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.sampling import NOT_FINITE, Detokenizer, Sampler, argmax, filter_logits, find_stop, token_logprob
from qkv.types import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])


def kept(params: SamplingParams) -> list[int]:
    return [i for i, x in enumerate(filter_logits(LOGITS, params)) if x > -torch.inf]


def test_filters_keep_what_they_say() -> None:
    hot: dict[str, Any] = {"temperature": 1.0}
    assert kept(SamplingParams(**hot)) == [0, 1, 2, 3, 4]
    assert kept(SamplingParams(**hot, top_k=2)) == [0, 4]
    assert kept(SamplingParams(**hot, top_p=0.5)) == [4]  # 64 % in the first: the token that crosses top_p stays
    assert kept(SamplingParams(**hot, top_p=0.7)) == [0, 4]
    assert kept(SamplingParams(**hot, min_p=0.1)) == [0, 1, 4]
    assert kept(SamplingParams(**hot, top_k=100)) == [0, 1, 2, 3, 4]


def test_the_distribution_is_the_softmax() -> None:
    sampler, params = Sampler(0), SamplingParams(temperature=2.0)
    draws = [sampler.sample(LOGITS[None], [(7, params)])[0] for _ in range(4000)]
    frequency = torch.bincount(torch.tensor(draws), minlength=5) / 4000
    assert torch.allclose(frequency, (LOGITS / 2).softmax(-1), atol=0.03)


def test_a_seeded_request_does_not_depend_on_its_batch() -> None:
    params = SamplingParams(temperature=1.5, seed=11)
    logits = torch.randn(20, 64)
    alone = Sampler(0)
    first = [alone.sample(row[None], [(3, params)])[0] for row in logits]
    crowd = Sampler(5)
    other = SamplingParams(temperature=1.0)
    second = [
        crowd.sample(torch.stack([row * 0.5, row, -row]), [(1, other), (9, params), (2, SamplingParams())])[1] for row in logits
    ]
    assert first == second


def test_greedy_and_sampling_rows_mix() -> None:
    tokens = Sampler(0).sample(
        torch.stack([LOGITS, LOGITS]), [(0, SamplingParams()), (1, SamplingParams(temperature=1.0, top_k=1))]
    )
    assert tokens == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_argmax_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 40] = logits[1, 70] = 9.0
    logits[2, 7] = torch.nan  # the largest, as for torch
    expected = [next(i for i, x in enumerate(row) if x != x or x == max(row)) for row in logits.tolist()]
    assert argmax(logits).tolist() == expected
    with torch.inference_mode():
        assert argmax(logits * 1).tolist() == expected


def test_logprobs_are_of_the_unfiltered_distribution() -> None:
    got = token_logprob(LOGITS, 1, 2)
    expected = LOGITS.log_softmax(-1)
    assert got.logprob == pytest.approx(float(expected[1]))
    assert [t for t, _ in got.top] == [4, 0]


class _Bytes:
    """A tokenizer whose tokens are UTF-8 bytes: the worst case for text in pieces."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


@given(text=st.text(max_size=40))
def test_streamed_text_is_never_half_a_character_and_ends_whole(text: str) -> None:
    data = list(text.encode())
    detokenizer = Detokenizer(_Bytes())
    shown = ""
    for n in range(1, len(data) + 1):
        now = detokenizer.update(data[:n])
        assert now.startswith(shown), "streamed text was taken back"
        assert text.startswith(now) or "�" in text
        shown = now
    assert detokenizer.finish(data) == text


def test_stop_strings_are_found_across_token_borders_and_once() -> None:
    assert find_stop("hello END world", ["END", "wor"], 0) == 6
    assert find_stop("hello EN", ["END"], 0) == -1
    assert find_stop("hello END", ["END"], 8) == 6  # "EN" had been searched already
    assert find_stop("abc", [], 0) == -1


@pytest.mark.parametrize("worst", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_yields_no_token_and_leaves_the_others_alone(worst: float, temperature: float) -> None:
    broken = LOGITS.clone()
    broken[1] = worst
    params = SamplingParams(temperature=temperature, top_k=1)
    assert Sampler(0).sample(torch.stack([LOGITS, broken, LOGITS]), [(i, params) for i in range(3)]) == [4, NOT_FINITE, 4]
