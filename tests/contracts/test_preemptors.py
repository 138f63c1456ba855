"""Every registered preemptor is deterministic, changes nothing, and never swaps what the host pool cannot hold."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.policies.preemptor.base import PREEMPTORS, CostModel, Preemptor
from qkv.types import RequestView

VIEWS = st.lists(
    st.builds(
        lambda tokens, private, priority: (tokens, private, priority),
        st.integers(1, 500),
        st.integers(0, 32),
        st.integers(-2, 2),
    ),
    min_size=1,
    max_size=12,
).map(
    lambda rows: [
        RequestView(i, p, max(1, t // 2), t, t - 1, -(-t // 16), min(private, -(-t // 16)), 0)
        for i, (t, private, p) in enumerate(sorted(rows, key=lambda r: r[2]))
    ]
)


@pytest.mark.parametrize("name", PREEMPTORS.names())
@given(views=VIEWS, need=st.integers(1, 20))
def test_victims_are_distinct_running_requests_and_enough(name: str, views: list[RequestView], need: int) -> None:
    preemptor = PREEMPTORS.build(name)
    before = list(views)
    victims = preemptor.victims(views, need)
    assert victims == preemptor.victims(views, need), "not deterministic"
    assert views == before, "inputs were changed"
    assert len(set(victims)) == len(victims)
    by_id = {v.id: v for v in views}
    assert set(victims) <= by_id.keys()
    freed = sum(by_id[v].num_private_blocks for v in victims)
    assert not victims or freed - by_id[victims[-1]].num_private_blocks < need, "more victims than needed"
    assert freed >= need or set(victims) == set(by_id), "too few victims although there were more"


@pytest.mark.parametrize("name", PREEMPTORS.names())
@given(
    views=VIEWS,
    host_free=st.integers(0, 40),
    prefill=st.none() | st.floats(1, 1e6),
    copy=st.none() | st.floats(1e3, 1e12),
)
def test_swap_only_where_the_host_pool_has_room(
    name: str, views: list[RequestView], host_free: int, prefill: float | None, copy: float | None
) -> None:
    preemptor = PREEMPTORS.build(name)
    costs = CostModel(16, 4096, prefill, copy)
    before = asdict(costs)
    for view in views:
        mode = preemptor.mode(view, host_free, costs)
        assert mode in ("recompute", "swap")
        assert mode == preemptor.mode(view, host_free, costs)
        assert mode == "recompute" or host_free >= view.num_blocks
    assert asdict(costs) == before


def _view(tokens: int) -> RequestView:
    return RequestView(0, 0, tokens, tokens + 1, tokens, -(-tokens // 16), -(-tokens // 16), 0)


def test_auto_goes_by_length_before_anything_was_measured() -> None:
    auto = PREEMPTORS.build({"name": "auto", "swap_from_tokens": 100})
    costs = CostModel(block_size=16, block_bytes=1000)
    assert auto.mode(_view(99), 1000, costs) == "recompute"
    assert auto.mode(_view(100), 1000, costs) == "swap"


def test_auto_goes_by_cost_once_both_rates_are_known() -> None:
    auto = PREEMPTORS.build("auto")
    slow_link = CostModel(16, block_bytes=10**6, prefill_tokens_per_s=10_000.0, copy_bytes_per_s=10**6)
    fast_link = CostModel(16, block_bytes=10**6, prefill_tokens_per_s=10_000.0, copy_bytes_per_s=10**12)
    assert auto.mode(_view(4096), 10_000, slow_link) == "recompute"
    assert auto.mode(_view(16), 10_000, fast_link) == "swap"


def test_smaller_blocks_move_the_break_even_towards_swap() -> None:
    """Quantized blocks are cheaper to copy, so the same victim is recomputed at 32 bits and swapped at 8."""
    auto = PREEMPTORS.build("auto")
    rates: dict[str, Any] = {"prefill_tokens_per_s": 1000.0, "copy_bytes_per_s": 1e6}
    assert auto.mode(_view(1024), 10_000, CostModel(16, block_bytes=16_000, **rates)) == "recompute"
    assert auto.mode(_view(1024), 10_000, CostModel(16, block_bytes=4_000, **rates)) == "swap"


@pytest.mark.parametrize("name", PREEMPTORS.names())
@given(views=VIEWS, need=st.integers(1, 20))
def test_built_in_policies_give_up_what_is_served_last(name: str, views: list[RequestView], need: int) -> None:
    preemptor = PREEMPTORS.build(name)
    if type(preemptor).victims is Preemptor.victims:
        victims = preemptor.victims(views, need)
        assert victims == [v.id for v in views[::-1][: len(victims)]]


def test_costs_are_means_over_all_that_was_measured_and_a_swap_copies_both_ways() -> None:
    costs = CostModel(block_size=16, block_bytes=1000)
    assert costs.recompute_s(10) is None
    assert costs.swap_s(10) is None
    for tokens, seconds in ((100, 1.0), (20, 1.0)):
        costs.count_prefill(tokens, seconds)
        costs.count_copy(1000 * tokens, seconds)
    assert costs.recompute_s(30) == pytest.approx(0.5)
    assert costs.swap_s(30) == pytest.approx(2 * 30_000 / 60_000)
