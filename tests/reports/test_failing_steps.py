"""A step that fails ends who is guilty, with the reason; everybody else finishes, with the tokens of a quiet run.

Each case breaks one place of a step, for some calls or for one request, while requests of every kind run on a pool that is too
small. After every step the books balance, and at the end nothing is left.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from qkv.engine import Engine
from qkv.errors import RequestError
from qkv.policies.evictor.base import PriorityEvictor
from qkv.policies.evictor.lru import LRU
from qkv.types import RequestOutput, SamplingParams
from tests.engine.support import make, tokens
from tests.reports.test_bad_requests import Words

PROMPTS = [tokens(0, 24) + tokens(10 + i, 8 + 3 * i) for i in range(6)]  # they begin alike: blocks are shared, hit and evicted
PARAMS = [
    SamplingParams(max_tokens=10 + i, ignore_eos=True, temperature=i % 2, seed=i, logprobs=2 * (i % 2) or None, stop=("#",))
    for i in range(6)
]
SWAP = {"preemptor": "swap", "num_blocks": 22}


def engine_of(**changes: Any) -> Engine:
    settings: dict[str, Any] = {"deterministic": True, "max_num_batched_tokens": 48, "tokenizer": Words()} | SWAP
    return make("int8_token", 8, **(settings | changes))


@pytest.fixture(scope="module")
def quiet() -> list[list[int]]:
    with engine_of() as engine:
        outs = engine.generate(PROMPTS, PARAMS)
        metrics = engine.metrics()["cache"]
        assert metrics["swap_bytes"]  # so that swapping and evicting can fail below
        assert metrics["evictions"]
        return [o.token_ids for o in outs]


def drive(engine: Engine) -> dict[int, RequestOutput]:
    """Step until all is done; the books balance after every step."""
    ended: dict[int, RequestOutput] = {}
    for _ in range(3000):
        if not engine.has_work:
            break
        for out in engine.step():
            if out.finish_reason is not None:
                assert out.id not in ended, "a request ended twice"
                ended[out.id] = out
        engine.check()
    assert not engine.has_work, "the engine does not come to an end"
    assert engine.scheduler.manager.allocator.num_referenced == 0
    host = engine.scheduler.manager.host
    assert host.num_free == host.num_blocks
    assert engine._loop._outputs._states == {} == engine._turns._calls
    return ended


def serve(engine: Engine, quiet: list[list[int]], guilty: set[int] | None) -> list[RequestOutput]:
    """All requests at once. guilty: which of them must end with an error (None: any may, but not all)."""
    ids = [engine.add_request(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    ended = drive(engine)
    outs = [ended[i] for i in ids]
    failed = {i for i, out in enumerate(outs) if out.finish_reason == "error"}
    assert failed == guilty if guilty is not None else len(failed) < len(outs)
    for i, out in enumerate(outs):
        if i in failed:
            assert out.error
            assert "\n" not in out.error
            assert out.token_ids == quiet[i][: len(out.token_ids)]
        else:
            assert (out.token_ids, out.finish_reason) == (quiet[i], "length"), f"a failure changed the answer of request {i}"
    return outs


@dataclass
class Fault:
    """target(engine): the object whose method is broken. Every `every`-th call raises, `times` times in all."""

    target: Callable[[Engine], Any]
    method: str
    every: int = 5
    times: int = 3
    error: Callable[[], BaseException] = lambda: OSError("no luck")
    spares_all: bool = False  # nobody's fault: nobody may end
    warm: bool = False  # needs cached blocks that nobody uses: a roomy pool, and all prompts once before


def _evictor(engine: Engine) -> Any:
    allocator: Any = engine.scheduler.manager.allocator
    return allocator._evictor


FAULTS = {
    # policies and books
    "allocate": Fault(lambda e: e.scheduler.manager.allocator, "allocate"),
    "acquire": Fault(lambda e: e.scheduler.manager.allocator, "acquire", every=2),
    "release": Fault(lambda e: e.scheduler.manager.allocator, "release", every=2),
    "publish": Fault(lambda e: e.scheduler.manager.allocator, "publish"),
    "match": Fault(lambda e: e.scheduler.manager.allocator, "match", every=3),
    "evictor add": Fault(_evictor, "add"),
    "evictor hit": Fault(_evictor, "hit", every=2),
    "evictor remove": Fault(_evictor, "remove", every=2, warm=True),
    "evictor pop": Fault(_evictor, "pop", every=2),
    "preemptor victims": Fault(lambda e: e.scheduler.preemptor, "victims", every=1),
    "preemptor mode": Fault(lambda e: e.scheduler.preemptor, "mode", every=1),
    "hash": Fault(lambda e: e.scheduler.manager._hasher, "extend"),
    "host pool": Fault(lambda e: e.scheduler.manager.host, "allocate", every=1, times=1),
    # host memory
    "reserve host": Fault(lambda e: e._parts.store, "reserve_host", every=1, times=1, spares_all=True, error=MemoryError),
    "copy out": Fault(lambda e: e._parts.store, "copy_out", every=1, times=1, spares_all=True),
    "copy in": Fault(lambda e: e._parts.store, "copy_in", every=1, times=1, spares_all=True),
    # the forward
    "metadata": Fault(lambda e: e._parts.runner, "_metadata", spares_all=True, times=1),
    "forward": Fault(lambda e: e._parts.adapter, "forward", spares_all=True, times=1),
    "forward, late": Fault(lambda e: e._parts.adapter, "forward", every=11, spares_all=True, times=1),
    "attend": Fault(lambda e: e._parts.backend, "attend", every=7, spares_all=True, times=1),
    "sampling": Fault(lambda e: e._loop._sampler, "sample", every=4, spares_all=True, times=1),
    "out of memory": Fault(
        lambda e: e._parts.adapter,
        "forward",
        spares_all=True,
        times=1,
        error=lambda: torch.OutOfMemoryError("CUDA out of memory"),
    ),
    "out of host memory": Fault(
        lambda e: e._parts.backend,
        "attend",
        spares_all=True,
        times=1,
        error=lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ),
    "python's memory": Fault(lambda e: e._parts.adapter, "forward", spares_all=True, times=2, every=9, error=MemoryError),
    # what is done with a token
    "one draw": Fault(lambda e: e._loop._sampler, "_draw"),
    "append": Fault(lambda e: e._loop._outputs, "append"),
    "output": Fault(lambda e: e._loop._outputs, "output", every=13, times=2),
    "decode": Fault(lambda e: e.tokenizer, "decode", every=13),
}


def broken(fault: Fault, original: Callable[..., Any], raised: list[BaseException]) -> Callable[..., Any]:
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(raised) < fault.times and next(calls) % fault.every == 0:
            raised.append(fault.error())
            raise raised[-1]
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("name", FAULTS)
def test_wherever_a_step_fails_the_others_finish_with_right_tokens(
    name: str, quiet: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, raised = FAULTS[name], list[BaseException]()
    with engine_of(**({"num_blocks": 128} if fault.warm else {})) as engine:
        if fault.warm:
            engine.generate(PROMPTS, SamplingParams(max_tokens=1, ignore_eos=True))
        target = fault.target(engine)
        monkeypatch.setattr(target, fault.method, broken(fault, getattr(target, fault.method), raised))
        outs = serve(engine, quiet, set() if fault.spares_all else None)
        assert raised, "the fault was never met"
        failed = [o for o in outs if o.finish_reason == "error"]
        assert len(failed) <= len(raised)
        assert bool(failed) != fault.spares_all
        assert all("no luck" in (o.error or "") for o in failed)
        monkeypatch.undo()
        serve(engine, quiet, set())  # the engine is as good as new


@pytest.mark.parametrize("name", ["release", "evictor add", "publish", "append", "forward", "copy out"])
def test_an_interrupt_anywhere_leaves_everything_in_order(
    name: str, quiet: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is nobody's error: it reaches who steps, and all requests finish afterwards."""
    fault, raised = replace(FAULTS[name], times=1, every=2, error=KeyboardInterrupt), list[BaseException]()
    with engine_of() as engine:
        target = fault.target(engine)
        monkeypatch.setattr(target, fault.method, broken(fault, getattr(target, fault.method), raised))
        ids = [engine.add_request(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        ended: dict[int, RequestOutput] = {}

        def until_interrupted() -> None:
            while True:
                ended.update({out.id: out for out in engine.step() if out.finish_reason})

        with pytest.raises(KeyboardInterrupt):
            until_interrupted()
        engine.check()
        ended |= drive(engine)
        assert [ended[i].token_ids for i in ids] == quiet


@contextmanager
def failing_when(engine: Engine, guilty: Callable[[list[int]], bool], error: Callable[[], Exception]) -> Iterator[list[int]]:
    """The forward raises whenever the step's tokens satisfy `guilty`; how often it did."""
    forward, count = engine._parts.adapter.forward, [0]  # type: ignore[attr-defined]

    def fail(ids: torch.Tensor, *args: Any) -> torch.Tensor:
        if guilty(ids.tolist()):
            count[0] += 1
            raise error()
        return forward(ids, *args)

    engine._parts.adapter.forward = fail  # type: ignore[attr-defined]
    try:
        yield count
    finally:
        engine._parts.adapter.forward = forward  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", range(6))
def test_a_request_that_no_forward_survives_is_found_and_ends_alone(at: int, quiet: list[list[int]]) -> None:
    """The model fails for one prompt's token, whatever else is in the batch."""
    others = {t for i in range(6) if i != at for t in (*PROMPTS[i], *quiet[i])}
    poison = next(t for t in PROMPTS[at] if t not in others)
    with engine_of() as engine, failing_when(engine, lambda ids: poison in ids, lambda: ValueError("bad token")) as count:
        outs = serve(engine, quiet, {at})
        assert (outs[at].error or "").startswith("its forward failed: ValueError: bad token (test_failing_steps.py, line ")
        assert 1 <= count[0] <= 6, "halving finds one of six within a few steps"


def test_memory_that_suffices_for_half_the_tokens_lets_everybody_finish(quiet: list[list[int]]) -> None:
    with engine_of() as engine, failing_when(engine, lambda ids: len(ids) > 32, lambda: torch.OutOfMemoryError("out")) as count:
        serve(engine, quiet, set())
        assert 1 <= count[0] < 12
        assert engine.scheduler.token_limit is not None


def test_memory_that_never_suffices_ends_the_requests_and_the_engine_stays_usable(quiet: list[list[int]]) -> None:
    with engine_of() as engine:
        with failing_when(engine, lambda _: True, MemoryError) as count:
            outs = engine.generate(PROMPTS, PARAMS)
            assert [o.finish_reason for o in outs] == ["error"] * 6
            assert all((o.error or "").startswith("its forward failed: MemoryError") for o in outs)
            assert count[0] <= 12, "one retry each"
            with pytest.raises(RequestError, match="MemoryError"):
                engine.score([PROMPTS[0]])
        engine.check()
        serve(engine, quiet, set())


def test_the_limit_of_tokens_is_lifted_after_good_steps() -> None:
    with engine_of() as engine:
        with failing_when(engine, lambda ids: len(ids) > 16, MemoryError):
            engine.generate(PROMPTS[:1], PARAMS[:1])
        assert engine.scheduler.token_limit is not None
        for _ in range(8):
            engine.generate(PROMPTS, PARAMS)
        assert engine.scheduler.token_limit is None


def test_logits_callbacks_that_raise_end_their_own_call_only(quiet: list[list[int]]) -> None:
    class Mine(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Mine("mine")

    with engine_of() as engine:
        expected = engine.score([PROMPTS[0]])[0].logprobs
        ids = [engine.add_request(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        with pytest.raises(Mine, match="mine"):
            engine.score([PROMPTS[0], PROMPTS[1]], on_logits=fail)
        assert engine._loop.receivers == {}
        ended = drive(engine)
        assert [ended[i].token_ids for i in ids] == quiet
        assert torch.equal(engine.score([PROMPTS[0]])[0].logprobs, expected)


def test_an_observer_that_raises_ends_what_it_saw_and_is_heard_of_at_the_end(quiet: list[list[int]]) -> None:
    with engine_of() as engine:
        outs: list[RequestOutput] = []

        def fail(layer: int, *_: Any) -> None:
            if layer == 1:
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"), engine.observe(fail):
            outs = engine.generate(PROMPTS[:2], PARAMS[:2])
        assert [o.finish_reason for o in outs] == ["error", "error"]
        serve(engine, quiet, set())


def test_a_watcher_that_raises_is_taken_away_and_heard_of_later(quiet: list[list[int]]) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("mine")

    with engine_of() as engine:
        engine.watch_steps(fail)
        serve(engine, quiet, set())
        with pytest.raises(ValueError, match="mine"):
            engine.watch_steps(None)
        engine.watch_steps(None)


def test_a_policy_of_the_users_that_always_raises_costs_those_it_is_asked_about_only() -> None:
    class Broken(LRU):
        def priority(self, meta: Any) -> Any:
            raise ZeroDivisionError("mine")

    with engine_of() as engine:
        engine.scheduler.manager.allocator._evictor = Broken()  # type: ignore[attr-defined]
        engine.scheduler.manager.allocator._bound = Broken(), 1
        outs = engine.generate(PROMPTS, PARAMS)
        assert {o.finish_reason for o in outs} <= {"error", "length"}
        assert "error" in {o.finish_reason for o in outs}
        assert all("ZeroDivisionError: mine" in (o.error or "") for o in outs if o.finish_reason == "error")
        engine.check()
        assert engine.scheduler.manager.allocator.num_referenced == 0


def test_a_priority_that_raises_leaves_the_evictor_as_it_was() -> None:
    class Picky(LRU):
        def priority(self, meta: Any) -> Any:
            if meta.block == 3:
                raise ZeroDivisionError("mine")
            return super().priority(meta)

    from qkv.policies.evictor.base import BlockMeta

    evictor: PriorityEvictor = Picky()
    evictor.add(BlockMeta(1, 0, 0, 0))
    with pytest.raises(ZeroDivisionError):
        evictor.add(BlockMeta(3, 0, 0, 0))
    assert len(evictor) == 1
    assert evictor.pop(1) == [1]


def test_swapping_that_fails_is_given_up_with_a_warning(quiet: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    with engine_of() as engine, caplog.at_level(logging.WARNING, "qkv"):
        engine._parts.store.reserve_host = broken(  # type: ignore[method-assign]
            FAULTS["reserve host"], engine._parts.store.reserve_host, []
        )
        serve(engine, quiet, set())
        (warning,) = (w for w in engine.metrics()["warnings"] if "swap" in w)
        assert warning.startswith("requests are not swapped any more, but recomputed: swapping failed: MemoryError")
        assert engine.scheduler.manager.host.num_blocks == 0
        assert all("\n" not in r.getMessage() for r in caplog.records)
        serve(engine, quiet, set())


def test_a_text_that_cannot_be_made_ends_a_stream_with_the_reason() -> None:
    class Fragile(Words):
        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            if len(token_ids) > 3:
                raise UnicodeError("cannot")
            return super().decode(token_ids, skip_special_tokens)

    with make(tokenizer=Fragile()) as engine:
        good, bad = SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=30, ignore_eos=True)
        outs = engine.generate([[5, 6], [7, 8]], [good, bad])
        assert [o.finish_reason for o in outs] == ["length", "error"]
        assert (outs[1].error or "").startswith("its text failed: UnicodeError: cannot")
        engine.check()
        assert not engine.has_work
    with make(tokenizer=Fragile()) as engine:
        Fragile.decode = lambda *_, **__: 1 / 0  # type: ignore[assignment,method-assign]
        outs = list(engine.stream([[5, 6]], bad))
        assert [o.finish_reason for o in outs] == ["error"]
        engine.generate([[5, 6]], good)
        assert not engine.has_work
        assert engine.scheduler.manager.allocator.num_referenced == 0


def test_a_clock_that_jumps_changes_no_answer(quiet: list[list[int]]) -> None:
    jumps = itertools.cycle([0.0, 1e9, -1e9, 5.0, 5.0, -3.0])
    with engine_of(clock=lambda: next(jumps)) as engine:
        serve(engine, quiet, set())
        engine.metrics()
