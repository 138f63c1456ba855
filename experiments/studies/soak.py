"""Everything at once for a while: random requests from many threads, aborts, and faults in every part of a step.

Takes: minutes. Gives: a row with the faults injected and survived by kind, requests per second and memory over time; fails with
the first answer that is not the one of a quiet run, the first thing that is left behind, or a call that never returns.

The engine runs in deterministic mode, so that whatever happens around a request, its tokens are those it gets alone. Every few
seconds a new engine with other policies and another pool is made on the same model.
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import psutil
import torch
from tqdm import tqdm

from experiments.harness.base import EXPERIMENTS, Experiment, Run
from experiments.harness.table import console, number, show
from experiments.measuring import engines
from experiments.measuring.faults import MARK, Faults, JumpingClock
from experiments.measuring.scales import provide, used_by
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import QkvError, RequestError
from qkv.models import load_model
from qkv.policies.evictor.base import EVICTORS
from qkv.policies.preemptor.base import PREEMPTORS
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.types import RequestOutput, SamplingParams
from qkv.validate import require

CATALOGUE = 24  # different requests, whose quiet answers are known
LONGEST = 56  # tokens of a prompt
HANG_S = 600.0  # after which a call counts as lost


@dataclass
class Quiet:
    """Requests, and what each gives when it is alone."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, seed: int) -> "Quiet":
        rng = random.Random(f"soak {seed}")
        draw: Callable[[int], list[int]] = lambda n: [rng.randrange(3, engine.intake.vocab_size) for _ in range(n)]  # noqa: E731
        shared = [draw(20), draw(33)]
        prompts = [(rng.choice([[], *shared]) + draw(LONGEST))[: rng.randrange(1, LONGEST)] for _ in range(CATALOGUE)]
        params = [
            SamplingParams(
                max_tokens=rng.randrange(1, 50),
                temperature=rng.choice((0.0, 0.7, 1.5)),
                top_p=rng.choice((1.0, 0.9)),
                seed=i,
                ignore_eos=True,
                logprobs=rng.choice((None, 0, 3)),
                priority=rng.randrange(3),
            )
            for i in range(CATALOGUE)
        ]
        quiet = cls(prompts, params)
        for prompt, sampling in zip(prompts, params, strict=True):
            quiet.tokens.append(engine.generate([prompt], sampling)[0].token_ids)
            quiet.logprobs.append(engine.score([prompt])[0].logprobs if len(prompt) > 1 else torch.empty(0))
        return quiet


class Wrong(Exception):
    """The soak found a mistake: an answer, or something left behind."""


@dataclass
class Round:
    """One engine and its threads. Counts are kept per thread and added at the end."""

    engine: Engine
    quiet: Quiet
    rate: float
    counts: Counter[str] = field(default_factory=Counter)
    _queued: dict[int, int] = field(default_factory=dict)  # add_request's id -> number in the catalogue
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def judge(self, number: int, out: RequestOutput) -> None:
        """Whether the request `number` of the catalogue may have come to this."""
        expected = self.quiet.tokens[number]
        if out.token_ids != expected[: len(out.token_ids)] or (out.finish_reason == "length" and out.token_ids != expected):
            raise Wrong(f"request {number} gave {out.token_ids}, and alone {expected}")
        if out.finish_reason == "error" and MARK not in (out.error or ""):
            raise Wrong(f"request {number} ended for a reason that nobody injected: {out.error}")
        if out.finish_reason is not None:
            self.count(f"ended: {out.finish_reason}")

    def work(self, seed: str, operations: int) -> None:
        rng = random.Random(seed)
        kinds = (self._generate, self._generate, self._generate, self._stream, self._stream, self._score, self._queue, self._bad)
        for _ in range(operations):
            rng.choice(kinds)(rng)
            self.engine.check()
            self.engine.metrics()

    def _generate(self, rng: random.Random) -> None:
        chosen = rng.sample(range(CATALOGUE), rng.randrange(1, 5))
        outs = self.engine.generate([self.quiet.prompts[i] for i in chosen], [self.quiet.params[i] for i in chosen])
        for i, out in zip(chosen, outs, strict=True):
            self.judge(i, out)

    def _stream(self, rng: random.Random) -> None:
        i, leave = rng.randrange(CATALOGUE), rng.randrange(1, 30)
        for n, out in enumerate(self.engine.stream([self.quiet.prompts[i]], self.quiet.params[i])):
            self.judge(i, out)
            if n == leave:
                self.count("stream left")
                break

    def _score(self, rng: random.Random) -> None:
        i, fail = rng.randrange(CATALOGUE), rng.random() < 0.2

        def callback(*_: Any) -> None:
            if fail:
                self.count("callback")
                raise LookupError(MARK)

        if len(self.quiet.prompts[i]) > 1:
            try:
                (score,) = self.engine.score([self.quiet.prompts[i]], on_logits=callback)
            except (LookupError, RequestError) as error:
                if MARK not in str(error):
                    raise Wrong(f"scoring {i} failed for a reason that nobody injected: {error}") from None
                self.count("ended: error")
            else:
                if not torch.equal(score.logprobs, self.quiet.logprobs[i]):
                    raise Wrong(f"the scores of {i} are not those of a quiet run")
                self.count("ended: scored")

    def _queue(self, rng: random.Random) -> None:
        i = rng.randrange(CATALOGUE)
        request_id = self.engine.add_request(self.quiet.prompts[i], self.quiet.params[i], salt=rng.choice(("", "tenant")))
        with self._lock:
            self._queued[request_id] = i
        if rng.random() < 0.5:
            self.engine.abort(request_id)
            self.count("abort")
        self._step()

    def _bad(self, rng: random.Random) -> None:
        bad: Sequence[Any] = ([], [-1], [self.engine.intake.vocab_size], None, [1.5], [3] * 10**5)
        (out,) = self.engine.generate([rng.choice(bad)])
        if out.finish_reason != "error":
            raise Wrong("a bad prompt was served")
        self.count("bad request")

    def _step(self) -> None:
        for out in self.engine.step():
            with self._lock:
                number = self._queued.get(out.id)
            if number is not None:  # else its number is not noted yet, and its end is not judged
                self.judge(number, out)

    def finish(self) -> None:
        """All threads are done: nothing may be left."""
        while self.engine.has_work:
            self._step()
        self.engine.check()
        left = {what: n for what, n in self.engine.left_over().items() if n}
        if left:
            raise Wrong(f"left behind: {left}")


@EXPERIMENTS.register("soak")
@dataclass
class Soak(Experiment):
    """minutes: how long. threads: that call at once. operations: calls of each thread per engine. rate: probability that a
    forward raises; other faults are as likely as their places are rare; 0: none. growth: bytes of memory that may be gained
    between the second and the last third."""

    minutes: float = 5.0
    threads: int = 6
    operations: int = 25
    rate: float = 0.01
    growth: int = 128 * 2**20

    def __post_init__(self) -> None:
        require(0 < self.minutes < float("inf"), "minutes", self.minutes, "above 0")
        require(self.threads >= 1, "threads", self.threads, "at least 1")
        require(self.operations >= 1, "operations", self.operations, "at least 1")
        require(0 <= self.rate < 0.5, "rate", self.rate, "at least 0 and below 0.5")

    def run(self, run: Run) -> None:
        quantizer = QUANTIZERS.build(run.engine.quantizer)
        used_by(run, [quantizer])
        loaded = load_model(run.engine.model)
        scales, origin = provide(run, loaded, quantizer, documents=4, tokens=64, skip=0)
        config = replace(run.engine, runner=replace(run.engine.runner, deterministic=True), scales=scales)
        with Engine(loaded, config) as reference:
            run.record.set("model", engines.model_part(loaded, reference))
            run.record.set("attention", reference.metrics()["attention"])
            quiet, log = Quiet.of(reference, run.engine.seed), logging.getLogger("qkv.loop")
            log.addFilter(unmarked)
            try:
                found = self._soak(run, config, loaded, quiet)
            finally:
                log.removeFilter(unmarked)
        run.add_row({"policy": engines.policy_part(run.engine, run.engine.quantizer, origin), "soak": found})
        self._show(found)

    def _soak(self, run: Run, config: EngineConfig, loaded: Any, quiet: Quiet) -> dict[str, Any]:
        rng, process = random.Random(f"rounds {run.engine.seed}"), psutil.Process()
        counts, injected, pool_operations, rounds = Counter[str](), Counter[str](), 0, 0
        memory: list[tuple[float, int]] = []
        began = time.monotonic()
        with tqdm(total=round(60 * self.minutes), disable=not run.progress, unit="s", leave=False) as bar:
            while not rounds or time.monotonic() - began < 60 * self.minutes:
                clock = JumpingClock(random.Random(rng.random()), self.rate)
                with Engine(loaded, random_policies(config, rng), clock) as engine:
                    run.watch(engine)
                    faults, part = Faults(engine, random.Random(rng.random()), self.rate), Round(engine, quiet, self.rate)
                    try:
                        self._round(part, f"{run.engine.seed} {rounds}")
                    except (Wrong, AssertionError, QkvError, TimeoutError) as error:
                        met = sum(injected.values()) + sum(faults.injected.values())
                        raise RequestError(
                            f"after {time.monotonic() - began:.0f} s and {met} faults, in round {rounds} (seed="
                            f"{run.engine.seed}): {error or type(error).__name__}"
                        ) from error
                counts, rounds = counts + part.counts, rounds + 1
                injected += faults.injected + Counter({"clock": clock.jumps})
                pool_operations += faults.pool_operations
                memory.append((round(time.monotonic() - began, 1), process.memory_info().rss))
                bar.update(min(round(memory[-1][0]), bar.total) - bar.n)
        injected += Counter({what: n for what, n in counts.items() if not what.startswith("ended: ")})
        seconds = time.monotonic() - began
        ended = {what.removeprefix("ended: "): n for what, n in sorted(counts.items()) if what.startswith("ended: ")}
        third = len(memory) // 3
        gained = median(m for _, m in memory[-third:]) - median(m for _, m in memory[third : 2 * third]) if third else 0
        if gained > self.growth:
            raise RequestError(f"memory grew by {gained / 2**20:.0f} MiB in the last third of {seconds:.0f} s: something is kept")
        return {
            "minutes": seconds / 60,
            "rounds": rounds,
            "threads": self.threads,
            "requests": sum(ended.values()),
            "requests_per_s": sum(ended.values()) / seconds,
            "ended": ended,
            "faults": {kind: {"injected": n, "survived": n} for kind, n in sorted(injected.items())},
            "pool_operations": pool_operations,
            "memory_bytes": [list(m) for m in memory[:: max(1, len(memory) // 100)]],
            "memory_gained_bytes": gained,
        }

    def _round(self, part: Round, seed: str) -> None:
        pool = ThreadPoolExecutor(self.threads)
        try:
            jobs = [pool.submit(part.work, f"{seed} {i}", self.operations) for i in range(self.threads)]
            for job in jobs:
                job.result(timeout=HANG_S)
        except TimeoutError:
            raise TimeoutError(f"a call did not return within {HANG_S:.0f} s") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        part.finish()

    def _show(self, found: dict[str, Any]) -> None:
        cells = [[kind, number(n["injected"]), number(n["survived"])] for kind, n in found["faults"].items()]
        show(f"{found['minutes']:.1f} minutes, {found['threads']} threads", ["fault", "injected", "survived"], cells)
        first, last = found["memory_bytes"][0][1], found["memory_bytes"][-1][1]
        console().print(
            f"{found['requests']:,} requests ({found['requests_per_s']:.1f}/s), {found['pool_operations']:,} pool operations, "
            f"{found['rounds']} engines; memory {first / 2**20:,.0f} MiB at first, {last / 2**20:,.0f} MiB at last. Every "
            "finished request gave the tokens of a quiet run, and nothing was left behind."
        )


def unmarked(record: logging.LogRecord) -> bool:
    """A filter of log lines: what we put there is no news."""
    return MARK not in record.getMessage()


def random_policies(config: EngineConfig, rng: random.Random) -> EngineConfig:
    """The same model and quantizer behind a small pool and policies at random."""
    block = int(config.allocator.get("block_size", 16))
    enough = -(-2 * LONGEST // block)  # blocks of the longest request
    cache = replace(
        config.cache,
        num_blocks=1 + rng.randrange(enough, 2 * enough),
        memory_bytes=None,
        memory_utilization=None,
        host_memory_bytes=rng.choice((0, "8MiB", "8MiB")),
        enable_prefix_caching=rng.random() < 0.8,
    )
    scheduler = replace(
        config.scheduler,
        max_num_seqs=rng.choice((2, 8, 12)),
        max_num_batched_tokens=rng.choice((12, 40, 200)),
        max_num_scored_tokens=rng.choice((3, 50)),
        max_model_len=2 * LONGEST,
        watermark=rng.choice((0.0, 0.05)),
    )
    return replace(
        config,
        cache=cache,
        scheduler=scheduler,
        evictor={"name": rng.choice(EVICTORS.names())},
        preemptor={"name": rng.choice([*PREEMPTORS.names(), "swap"])},
    )
