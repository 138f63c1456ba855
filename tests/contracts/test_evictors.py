"""Every registered evictor keeps its contract over random traces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.policies.evictor.base import EVICTORS, BlockMeta, NotEnough, PriorityEvictor

OPS = st.lists(st.tuples(st.sampled_from(["add", "hit", "remove", "pop"]), st.integers(0, 11)), max_size=80)


@pytest.mark.parametrize("name", EVICTORS.names())
@given(ops=OPS)
def test_pop_order_equals_a_brute_force_sort(name: str, ops: list[tuple[str, int]]) -> None:
    evictor = EVICTORS.build(name)
    held: dict[int, BlockMeta] = {}
    metas = {b: BlockMeta(b, depth=b % 4, born_step=b, last_step=b) for b in range(12)}
    for step, (op, b) in enumerate(ops, start=100):
        if op == "add" and b not in held:
            metas[b].last_step = step
            held[b] = metas[b]
            evictor.add(metas[b])
        elif op == "hit":
            metas[b].hits += 1
            metas[b].last_step = step
            evictor.hit(metas[b])
        elif op == "remove" and b in held:
            del held[b]
            evictor.remove(b)
        elif op == "pop":
            n = b % 4
            if n > len(held):
                with pytest.raises(NotEnough):
                    evictor.pop(n)
            else:
                victims = evictor.pop(n)
                assert len(set(victims)) == n
                assert set(victims) <= held.keys()
                if isinstance(evictor, PriorityEvictor):
                    worst = sorted(held.values(), key=lambda m: (evictor.priority(m), -m.depth, m.block))
                    assert victims == [m.block for m in worst[:n]]
                for v in victims:
                    del held[v]
        assert len(evictor) == len(held)


@pytest.mark.parametrize("name", EVICTORS.names())
def test_not_enough_changes_nothing(name: str) -> None:
    evictor = EVICTORS.build(name)
    for b in range(3):
        evictor.add(BlockMeta(b, 0, b, b))
    with pytest.raises(NotEnough):
        evictor.pop(4)
    assert sorted(evictor.pop(3)) == [0, 1, 2]


@pytest.mark.parametrize("name", EVICTORS.names())
def test_removing_a_block_that_is_not_held_is_an_error(name: str) -> None:
    with pytest.raises(KeyError, match="7"):
        EVICTORS.build(name).remove(7)


@pytest.mark.parametrize("name", EVICTORS.names())
@settings(max_examples=20)
@given(n=st.integers(1, 40))
def test_a_long_trace_of_hits_does_not_grow_the_evictor(name: str, n: int) -> None:
    """Entries that hits have replaced must not pile up in the heap."""
    evictor = EVICTORS.build(name)
    meta = BlockMeta(1, 0, 0, 0)
    evictor.add(meta)
    for step in range(200 * n):
        meta.hits, meta.last_step = step, step
        evictor.hit(meta)
    if isinstance(evictor, PriorityEvictor):
        assert len(evictor._heap) < 100
    assert evictor.pop(1) == [1]


def _order(name: str, metas: list[BlockMeta]) -> list[int]:
    evictor = EVICTORS.build(name)
    for m in metas:
        evictor.add(m)
    return evictor.pop(len(metas))


def test_exact_order_of_each_built_in() -> None:
    """Three blocks: one old and popular, one new and unpopular, one in between."""
    metas = [
        BlockMeta(1, depth=0, born_step=1, last_step=50, hits=9),
        BlockMeta(2, depth=0, born_step=2, last_step=10, hits=0),
        BlockMeta(3, depth=0, born_step=3, last_step=40, hits=1),
        BlockMeta(4, depth=0, born_step=4, last_step=20, hits=3),
    ]
    assert _order("lru", metas) == [2, 4, 3, 1]
    assert _order("fifo", metas) == [1, 2, 3, 4]
    assert _order("lfu", metas) == [2, 3, 4, 1]
    assert _order("slru", metas) == [2, 3, 4, 1]


def test_ties_evict_the_deeper_block_first() -> None:
    assert _order("lru", [BlockMeta(b, depth=d, born_step=0, last_step=5) for b, d in ((1, 0), (2, 2), (3, 1))]) == [2, 3, 1]


def test_lfu_differs_from_lru_on_a_scan() -> None:
    """A popular block survives a scan of one-time blocks under lfu and not under lru."""
    popular = BlockMeta(1, depth=0, born_step=0, last_step=10, hits=5)
    scan = [BlockMeta(b, depth=0, born_step=20 + b, last_step=20 + b) for b in range(2, 8)]
    assert _order("lru", [popular, *scan])[0] == 1
    assert _order("lfu", [popular, *scan])[-1] == 1


def test_lfu_counts_age() -> None:
    """A block that was popular long ago goes before one that is mildly popular now."""
    evictor = EVICTORS.build({"name": "lfu", "age_steps": 10.0})
    evictor.add(BlockMeta(1, depth=0, born_step=0, last_step=0, hits=100))
    evictor.add(BlockMeta(2, depth=0, born_step=0, last_step=100, hits=1))
    assert evictor.pop(1) == [1]


def test_slru_protects_from_the_hit_on_that_it_names() -> None:
    old, new = BlockMeta(1, depth=0, born_step=0, last_step=1, hits=2), BlockMeta(2, depth=0, born_step=0, last_step=9, hits=1)
    assert _order("slru", [old, new]) == [2, 1]
