"""Slots of raw rows are never lost or owned twice, are shared with a prefix, and go along when a request is swapped."""

import random

import pytest

from qkv.cache.raw_slots import SinkSlots, TailSlots


def test_tail_slots_are_owned_by_one_request_each() -> None:
    slots = TailSlots(3)
    taken = [slots.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    slots.check(taken)
    slots.give_back(taken[1])
    slots.check([taken[0], taken[2]])
    with pytest.raises(AssertionError, match="leaked"):
        slots.check(taken)


def test_sequences_that_share_their_first_block_share_the_sinks() -> None:
    slots = SinkSlots(2)
    slot = slots.take(7)
    assert slots.take(7) == slot
    slots.check([7, 7])
    slots.give_back(7)
    slots.give_back(7)
    assert slots.holds(7), "kept for a later match"
    assert slots.take(7) == slot


def test_the_longest_unused_sinks_make_room_and_a_reused_block_starts_anew() -> None:
    slots = SinkSlots(2)
    for block in (1, 2):
        slots.take(block)
        slots.give_back(block)
    slots.take(1)
    slots.take(3)
    assert slots.holds(1)
    assert not slots.holds(2)
    slots.give_back(3)
    slots.take(3)  # evicted meanwhile and handed out again
    slots.check([1, 3])


def test_random_use_keeps_the_books() -> None:
    rng, n = random.Random(0), 4
    slots = SinkSlots(n)
    running: list[int] = []
    for _ in range(3000):
        if running and (len(running) == n or rng.random() < 0.5):
            slots.give_back(running.pop(rng.randrange(len(running))))
        else:
            block = rng.randrange(1, 9)
            shared = slots.holds(block) and (block in running or rng.random() < 0.5)
            if block in running and not shared:
                continue
            slots.take(block)
            running.append(block)
        slots.check(running)
