"""Many threads, one engine: everybody gets their own right answers, batched together; and asyncio."""

import asyncio
import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from qkv.engine import Engine
from qkv.errors import ClosedError, RequestError
from qkv.types import RequestOutput, SamplingParams
from tests.engine.support import make, tokens

PROMPTS = [tokens(i, 6 + i % 9) for i in range(12)]
PARAMS = [
    SamplingParams(max_tokens=3 + i % 5, ignore_eos=True, temperature=i % 3 / 2, seed=i, priority=i % 2, logprobs=i % 2 or None)
    for i in range(12)
]


class Quiet:
    """What each request and each scored list gives when it is alone."""

    def __init__(self, engine: Engine) -> None:
        self.tokens = [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]
        self.scores = [engine.score([p])[0].logprobs for p in PROMPTS]


def busy_engine() -> Engine:
    """Deterministic, so that batches cannot change a bit; a pool that is too small, so that requests are preempted."""
    return make("int8_token", 8, num_blocks=24, preemptor="swap", deterministic=True, max_num_batched_tokens=40)


def run_threads(work: list[Callable[[], None]]) -> None:
    """All at once; the first failure is raised. A thread that hangs fails the test."""
    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(w) for w in work]:
            future.result(timeout=240)


def hammer(engine: Engine, quiet: Quiet, seed: int, rounds: int) -> Callable[[], None]:
    def generate(rng: random.Random) -> None:
        chosen = rng.sample(range(12), rng.randrange(1, 4))
        outs = engine.generate([PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen])
        assert [o.token_ids for o in outs] == [quiet.tokens[i] for i in chosen]

    def stream(rng: random.Random) -> None:
        i, leave = rng.randrange(12), rng.randrange(1, 9)
        for n, out in enumerate(engine.stream([PROMPTS[i]], PARAMS[i])):
            assert out.token_ids == quiet.tokens[i][: len(out.token_ids)]
            if n == leave:
                break

    def score(rng: random.Random) -> None:
        i = rng.randrange(12)
        assert torch.equal(engine.score([PROMPTS[i]])[0].logprobs, quiet.scores[i])

    def add_and_abort(rng: random.Random) -> None:
        engine.abort(engine.add_request(PROMPTS[rng.randrange(12)], PARAMS[0]))
        for out in engine.step():
            assert out.token_ids == quiet.tokens[0][: len(out.token_ids)] or out.finish_reason == "abort"

    def look(_: random.Random) -> None:
        metrics = engine.metrics()
        assert 0 <= metrics["memory"]["utilization_now"] <= 1
        engine.check()

    def work() -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            rng.choice((generate, generate, stream, score, add_and_abort, look))(rng)

    return work


def stress(threads: int, rounds: int) -> None:
    with busy_engine() as engine:
        quiet = Quiet(engine)
        engine.reset_prefix_cache()
        run_threads([hammer(engine, quiet, seed, rounds) for seed in range(threads)])
        while engine.has_work:
            engine.step()
        engine.check()
        assert engine.scheduler.manager.allocator.num_referenced == 0
        assert engine._loop.receivers == {} == engine._turns._calls
        assert engine._loop._outputs._states == {}


def test_generate_stream_score_abort_and_metrics_from_many_threads_give_what_a_quiet_engine_gives() -> None:
    stress(threads=6, rounds=8)


@pytest.mark.slow
def test_many_threads_for_longer() -> None:
    stress(threads=24, rounds=150)


def test_requests_of_different_threads_run_in_the_same_steps() -> None:
    with make() as engine:
        batches: list[int] = []
        engine.watch_steps(lambda plan, _: batches.append(len(plan.decodes)))
        barrier = threading.Barrier(5)

        def work(i: int) -> None:
            barrier.wait()
            engine.generate([PROMPTS[i]], SamplingParams(max_tokens=60, ignore_eos=True))

        run_threads([lambda i=i: work(i) for i in range(5)])  # type: ignore[misc]
        assert max(batches) == 5


def test_a_stream_that_nobody_reads_delays_nobody_and_keeps_the_newest_state_only() -> None:
    with make() as engine:
        slow = engine.stream([PROMPTS[0]], SamplingParams(max_tokens=40, ignore_eos=True))
        first = next(slow)
        others: list[RequestOutput] = []
        thread = threading.Thread(
            target=lambda: others.extend(engine.generate(PROMPTS[1:4], SamplingParams(max_tokens=50, ignore_eos=True)))
        )
        thread.start()
        thread.join(60)
        assert [len(o.token_ids) for o in others] == [50, 50, 50]
        rest = list(slow)
        assert len(rest) == 1  # it ended meanwhile
        assert rest[0].token_ids[: len(first.token_ids)] == first.token_ids
        assert (len(rest[0].token_ids), rest[0].finish_reason) == (40, "length")


def waiting(engine: Engine, work: Callable[[], Any], gate: threading.Event) -> tuple[threading.Thread, list[BaseException]]:
    """A thread in `work`, which ends in an exception; returns when its step is under way."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert gate.wait(60)
    return thread, raised


@pytest.mark.parametrize("kind", ["generate", "stream", "score"])
def test_closing_ends_the_calls_of_other_threads_with_one_clear_error(kind: str) -> None:
    engine, gate = make(), threading.Event()
    engine.watch_steps(lambda *_: gate.set())
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    work: dict[str, Callable[[], Any]] = {
        "generate": lambda: engine.generate([PROMPTS[0]], long),
        "stream": lambda: list(engine.stream([PROMPTS[0]], long)),
        "score": lambda: [engine.score([tokens(i, 400)]) for i in range(100)],
    }
    started = [waiting(engine, work[kind], gate) for _ in range(3)]
    engine.close()
    for thread, raised in started:
        thread.join(60)
        assert not thread.is_alive(), "a call still waits for a closed engine"
        (error,) = raised
        assert isinstance(error, ClosedError), error
        assert "closed" in str(error)
        assert "\n" not in str(error)
    for call in (lambda: engine.generate([PROMPTS[0]]), lambda: engine.add_request(PROMPTS[0]), engine.step):
        with pytest.raises(ClosedError, match="the engine is closed; make a new one"):
            call()
    engine.close()


def test_a_callback_may_look_and_add_but_not_step() -> None:
    seen: list[Any] = []
    with make() as engine:

        def callback(*_: Any) -> None:
            seen.append(engine.metrics()["requests"]["running"])
            engine.abort(engine.add_request(PROMPTS[1]))
            for call in (engine.step, engine.close, lambda: engine.generate([PROMPTS[1]]), lambda: engine.score([PROMPTS[1]])):
                with pytest.raises(RequestError, match="from inside a step"):
                    call()

        engine.score([PROMPTS[0]], on_logits=callback)
        assert seen == [1]
        while engine.has_work:
            engine.step()
        engine.check()


def test_a_stream_that_garbage_collection_ends_gives_its_blocks_back() -> None:
    with make() as engine:
        stream = engine.stream([PROMPTS[0]], SamplingParams(max_tokens=50))
        next(stream)
        assert engine.scheduler.num_running == 1
        del stream
        gc.collect()
        assert engine.scheduler.idle
        assert engine.scheduler.manager.allocator.num_referenced == 0


def test_asyncio_streams_run_together_beside_threads() -> None:
    with busy_engine() as engine:
        quiet = Quiet(engine)
        engine.reset_prefix_cache()

        async def one(i: int) -> None:
            last = None
            async for out in engine.astream([PROMPTS[i]], PARAMS[i]):
                assert out.token_ids == quiet.tokens[i][: len(out.token_ids)]
                last = out
            assert last is not None
            assert (last.token_ids, last.finish_reason) == (quiet.tokens[i], "length")

        async def all_of_them() -> None:
            await asyncio.gather(*(one(i % 12) for i in range(30)))

        run_threads([lambda: asyncio.run(all_of_them()), hammer(engine, quiet, 1, 4), hammer(engine, quiet, 2, 4)])
        asyncio.run(one(3))  # the thread that steps has ended, and another is started
        while engine.has_work:
            engine.step()
        engine.check()


def test_an_asyncio_stream_tells_of_refused_prompts_and_of_closing() -> None:
    engine = make()

    async def refused() -> list[RequestOutput]:
        return [out async for out in engine.astream([[], PROMPTS[0]], SamplingParams(max_tokens=1, ignore_eos=True))]

    assert [out.finish_reason for out in asyncio.run(refused())] == ["error", "length"]

    async def closed() -> None:
        stream = engine.astream([PROMPTS[0]], SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(ClosedError):
            async for _ in stream:
                pass

    asyncio.run(closed())


def test_a_cancelled_task_aborts_its_requests() -> None:
    with make() as engine:

        async def main() -> None:
            started = asyncio.Event()

            async def read() -> None:
                async for _ in engine.astream([PROMPTS[0], PROMPTS[1]], SamplingParams(max_tokens=400, ignore_eos=True)):
                    started.set()

            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        engine.generate([PROMPTS[2]], SamplingParams(max_tokens=1))
        assert not engine.has_work
        engine.check()
        assert engine.recorder.requests_finished["abort"] == 2
        assert engine.scheduler.manager.allocator.num_referenced == 0
