"""Sampling parameters refuse nonsense; requests and plans count what they say they count."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import ConfigError
from qkv.types import PrefillChunk, Request, SamplingParams, StepPlan


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", "many"),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", 1.0),
        ("min_p", -0.5),
        ("min_p", math.nan),
        ("seed", 1.5),
        ("stop", ("",)),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.5]),
        ("logprobs", -1),
        ("logprobs", 101),
        ("priority", "high"),
    ],
)
def test_sampling_params_refuse_nonsense_and_name_it(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})


@given(
    max_tokens=st.none() | st.integers(1),
    temperature=st.floats(0, 1e6),
    top_k=st.integers(0),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1, exclude_max=True),
    seed=st.none() | st.integers(),
    stop=st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.lists(st.integers(0), max_size=3),
    logprobs=st.none() | st.integers(0, 100),
    priority=st.integers(),
)
def test_sampling_params_accept_their_whole_range(**fields: Any) -> None:
    params = SamplingParams(**fields)
    assert params.stop == tuple(fields["stop"])
    assert params.stop_token_ids == tuple(fields["stop_token_ids"])
    assert hash(params) == hash(SamplingParams(**fields))


def test_one_stop_string_is_not_taken_apart() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def make_request(prompt: int = 5, output: int = 0, **fields: Any) -> Request:
    return Request(
        id=1, prompt_len=prompt, token_ids=list(range(prompt + output)), params=SamplingParams(), max_tokens=8, **fields
    )


@pytest.mark.parametrize(
    ("output", "computed", "decoding"), [(0, 0, False), (0, 4, False), (1, 5, True), (3, 7, True), (3, 5, False)]
)
def test_a_request_decodes_when_exactly_its_newest_token_is_not_computed(output: int, computed: int, decoding: bool) -> None:
    request = make_request(output=output, num_computed=computed)
    assert request.decoding is decoding
    assert request.num_inputs == 5 + output


def test_a_scoring_request_never_decodes_and_its_last_token_is_no_input() -> None:
    request = make_request(score_from=1, num_computed=4)
    assert request.num_inputs == 4
    assert not request.decoding
    assert PrefillChunk(request, 0, 4).completes
    assert not PrefillChunk(request, 0, 3).completes


def test_serving_order_is_priority_then_arrival() -> None:
    def key(id: int, priority: int) -> tuple[int, int]:
        return Request(id=id, prompt_len=1, token_ids=[0], params=SamplingParams(priority=priority), max_tokens=1).sort_key

    assert sorted([key(3, 0), key(1, 1), key(2, 0), key(4, -1)]) == [key(4, -1), key(2, 0), key(3, 0), key(1, 1)]


def test_a_plan_counts_its_tokens() -> None:
    request = make_request()
    plan = StepPlan(step=0, decodes=[request] * 3, prefills=[PrefillChunk(request, 2, 5)], swap_out=[], swap_in=[], preempted=[])
    assert plan.num_tokens == 6
    assert not plan.empty
    assert StepPlan(step=0, decodes=[], prefills=[], swap_out=[], swap_in=[], preempted=[request]).empty
