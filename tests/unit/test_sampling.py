"""Sampling against the definitions, and text that comes out whole."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.sampling import NOT_FINITE, Detokenizer, Sampler, StopSearch, argmax, filter_logits, token_logprob
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
    draws = [sampler.sample(LOGITS[None], [(7, params, i)])[0] for i in range(4000)]
    frequency = torch.bincount(torch.tensor(draws), minlength=5) / 4000
    assert torch.allclose(frequency, (LOGITS / 2).softmax(-1), atol=0.03)


def test_a_seeded_request_does_not_depend_on_its_batch() -> None:
    params = SamplingParams(temperature=1.5, seed=11)
    logits = torch.randn(20, 64)
    alone = Sampler(0)
    first = [alone.sample(row[None], [(3, params, i)])[0] for i, row in enumerate(logits)]
    crowd = Sampler(5)
    other = SamplingParams(temperature=1.0)
    second = []
    for i, row in enumerate(logits):
        mixed = [(1, other, i + 3), (9, params, i), (2, SamplingParams(), i)]
        second.append(crowd.sample(torch.stack([row * 0.5, row, -row]), mixed)[1])
        assert second == first[: i + 1]
        crowd.sample(row[None], [(9, params, i)])  # a step that had to be repeated draws the same again
    assert first == second


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-46, 1e-45, 1e-40, 1e-38, 1e-30, 1e-8, 1e300])
def test_no_temperature_gives_nan(temperature: float) -> None:
    """What float32 cannot divide by is greedy, and everything else exact."""
    for top_p, min_p, top_k in ((1.0, 0.0, 0), (1e-320, 0.0, 0), (1.0, 1 - 1e-16, 0), (0.5, 0.5, 10**30)):
        params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=-(10**30))
        (token,) = Sampler(0).sample(LOGITS[None], [(0, params, 3)])
        assert isinstance(token, int), token
        assert token == 4 or temperature > 1
        assert filter_logits(LOGITS, params).softmax(-1).isfinite().all() or temperature < 1.2e-38


def test_a_row_that_cannot_be_drawn_from_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, draw, hot = Sampler(0), Sampler._draw, SamplingParams(temperature=1.0, seed=1)

    def fail(self: Sampler, logits: torch.Tensor, request_id: int, *rest: Any) -> int:
        if request_id == 1:
            raise ValueError("no luck")
        return draw(self, logits, request_id, *rest)

    rows = [(0, hot, 0), (1, hot, 0), (2, hot, 0), (3, SamplingParams(), 0)]
    expected = sampler.sample(LOGITS.expand(4, -1), rows)
    monkeypatch.setattr(Sampler, "_draw", fail)
    tokens = sampler.sample(LOGITS.expand(4, -1), rows)
    assert isinstance(tokens[1], ValueError)
    assert [t for i, t in enumerate(tokens) if i != 1] == [t for i, t in enumerate(expected) if i != 1]


def test_greedy_and_sampling_rows_mix() -> None:
    tokens = Sampler(0).sample(
        torch.stack([LOGITS, LOGITS]), [(0, SamplingParams(), 5), (1, SamplingParams(temperature=1.0, top_k=1), 5)]
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


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    assert [t for t, _ in token_logprob(LOGITS, 1, 100).top] == [4, 0, 1, 2, 3]


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


def search(stops: list[str], *texts: str) -> list[tuple[bool, int]]:
    """What is found in a growing text, and how much of it is safe to show."""
    stop = StopSearch(stops)
    return [(stop.found(text), stop.safe) for text in texts]


def test_stop_strings_are_found_across_token_borders_and_once() -> None:
    assert search(["END", "wor"], "hello END world") == [(True, 6)]
    assert search(["END"], "hello E", "hello EN", "hello END") == [(False, 6), (False, 6), (True, 6)]
    assert search([], "abc") == [(False, 3)]


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_decided() -> None:
    assert search(["abab"], "xa", "xab", "xaba", "xabac") == [(False, 1), (False, 1), (False, 1), (False, 5)]
    assert search(["abc", "bd"], "ab", "abd") == [(False, 0), (True, 1)]


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data())
def test_what_is_shown_before_a_stop_string_is_found_never_holds_a_part_of_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """However the text comes in pieces; and nothing is held back that no stop string can begin in."""
    search, at = StopSearch(stops), 0
    first = min((text.find(s) for s in stops if s in text), default=None)
    while at < len(text):
        at += data.draw(st.integers(1, 3))
        seen = text[:at]
        found = search.found(seen)
        assert found == any(s in seen for s in stops)
        if found:
            # in a larger piece an earlier beginning wins, which is the one that text as a whole has
            assert search.safe == min(seen.find(s) for s in stops if s in seen)
            break
        assert search.safe == next((i for i in range(len(seen)) if any(s.startswith(seen[i:]) for s in stops)), len(seen))
        assert first is None or search.safe <= first


def test_a_huge_stop_string_is_searched_in_time() -> None:
    search, text = StopSearch(["a" * 200_000 + "b", "c" * 100_000]), ""
    for _ in range(2000):
        text += "a" * 50
        assert not search.found(text)
    assert search.safe == 0  # all of it may be the beginning
    assert not search.found(text + "x")
    assert search.safe == len(text) + 1


@pytest.mark.parametrize("worst", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_yields_no_token_and_leaves_the_others_alone(worst: float, temperature: float) -> None:
    broken = LOGITS.clone()
    broken[1] = worst
    params = SamplingParams(temperature=temperature, top_k=1)
    assert Sampler(0).sample(torch.stack([LOGITS, broken, LOGITS]), [(i, params, 0) for i in range(3)]) == [4, NOT_FINITE, 4]
