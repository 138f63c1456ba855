"""The engine: wires model, pool, policies and scheduler, and turns the handle. Decides nothing itself.

The life of a request, in call order: intake -> scheduler (block manager, preemptor) -> runner (attention backend, store)
-> sampler -> outputs. Who steps, when many threads call, is decided in turns.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from qkv.assemble import Parts, assemble, build_policies, usable_scales
from qkv.attention.base import Observer
from qkv.config import EngineConfig
from qkv.errors import ConfigError, RequestError
from qkv.intake import Intake, Prompt, shown
from qkv.layout import LayerShape
from qkv.loop import Loop
from qkv.metrics import summary
from qkv.metrics.recorder import Recorder
from qkv.metrics.summary import Latencies
from qkv.models import LoadedModel, load_model, wrap_model
from qkv.outputs import Outputs
from qkv.scheduler import Scheduler
from qkv.scoring import OnLogits, Score, Scoring
from qkv.settings import EngineSettings, engine_config
from qkv.simulation import SimulatedClock, SimulatedLoop, SimulatedModel, assemble_simulated
from qkv.turns import Call, Turns
from qkv.types import Request, RequestMetrics, RequestOutput, SamplingParams, StepPlan

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Engine:
    """Generation and scoring on a paged, quantized KV cache. Make one with `Engine.create` or `Engine.from_config`;
    close it (or use it in a `with`) to give a passed-in model its own attention back.

    Threads: every method may be called from any thread at any time. Requests of all callers run in the same steps, which one of
    the waiting threads takes for everybody, and each caller gets its own results; a stream that is read slowly delays nobody.
    metrics(), check() and the like wait for the step that runs. close() ends the calls that wait with ClosedError. Callbacks
    (on_logits, observers) run within a step, in whichever thread takes it: from there only add_request, abort and metrics() may
    be called. For asyncio there is astream().

    Failures: what raises while the engine works for one request (sampling, text, a callback, a policy that was asked about it)
    ends that request with finish_reason "error" and the reason; the others finish with the tokens they would have had.
    """

    def __init__(
        self,
        loaded: LoadedModel | SimulatedModel | None,
        config: EngineConfig,
        clock: Callable[[], float] | None = None,
        tokenizer: Any = None,
    ) -> None:
        """loaded: None loads what config.model names. tokenizer: instead of the loaded model's own."""
        policies = build_policies(config)  # unknown names, keys and values fail here, before any model is loaded
        scales = usable_scales(config, policies.quantizer)
        if loaded is None:
            simulated = config.runner.name == "simulated"
            loaded = SimulatedModel.of(config.model) if simulated else load_model(config.model)
        if tokenizer is not None and isinstance(loaded, LoadedModel):
            loaded = replace(loaded, tokenizer=tokenizer)
        self._parts: Parts
        loop: type[Loop]
        if clock is None:
            clock = time.process_time if config.runner.clock == "cpu" else time.perf_counter
        if isinstance(loaded, SimulatedModel):
            clock = SimulatedClock()
            self._parts, loop = assemble_simulated(loaded, config, policies, scales, clock), SimulatedLoop
        else:
            self._parts, loop = assemble(loaded, config, policies, scales), Loop
        self.config, self.loaded, self.clock = config, loaded, clock
        self._loop = loop(self._parts, Outputs(loaded.tokenizer, self._parts.adapter.eos_token_ids), config.seed, clock)
        self._turns = Turns(self._loop)
        self.tokenizer = loaded.tokenizer
        self.intake: Intake = self._parts.intake
        self.scheduler: Scheduler = self._parts.scheduler
        self.recorder: Recorder = self._parts.scheduler.recorder

    # -- making one --------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        model: "str | Path | PreTrainedModel | LoadedModel" = "smollm2",
        tokenizer: Any = None,
        clock: Callable[[], float] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> "Engine":
        """An engine from keyword arguments: the settings of EngineConfig, flat, as settings.py lists them.

        model: a known name, hub id, local path, or a transformers model object (then dtype and device are the object's).
        Raises ConfigError, ModelError or ScaleError before anything expensive where it can.
        """
        if isinstance(model, str | Path):
            return cls.from_config(engine_config(str(model), **settings), tokenizer, clock)
        loaded = model if isinstance(model, LoadedModel) else wrap_model(model, tokenizer)
        return cls(loaded, engine_config("object", **settings), clock)

    @classmethod
    def from_config(cls, config: EngineConfig, tokenizer: Any = None, clock: Callable[[], float] | None = None) -> "Engine":
        """Load the configured model and build an engine on it."""
        return cls(None, config, clock, tokenizer)

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, salt: str = "", arrival: float | None = None
    ) -> int:
        """Queue a prompt (text or token ids); returns its id. Raises RequestError. salt separates prefix caches.

        arrival: when it came, by the engine's clock, where that was during a step; None means now. Times count from it.
        """
        return self._add(self._turns.unclaimed, prompt, params, salt, arrival)

    def abort(self, request_id: int) -> None:
        """End a request, whatever its state; its blocks are back before the next step. Raises RequestError for what is no id."""
        if not isinstance(request_id, int):
            raise RequestError(f"abort takes a request's id, not {shown(request_id)}")
        self.intake.abort(request_id)

    @property
    def has_work(self) -> bool:
        with self._turns.alone():
            return not (self.intake.empty and self.scheduler.idle and not self._turns.unclaimed.news)

    def step(self) -> list[RequestOutput]:
        """Run one step, for everybody. Returns the state of every request of add_request that got a token or ended."""
        return self._turns.step(self._loop.output)

    def advance(self) -> list[Request]:
        """step() for those who measure: no outputs are made, and a simulation takes alike steps at once. Returns the requests
        that got a token or ended, to read and not to change."""
        return self._turns.step(self._seen)

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue all prompts; results in their order. A prompt that cannot be served, or that something fails for on the way,
        gives an output with finish_reason "error" and the reason in `error`; the others finish. progress: a bar, if stderr is
        a terminal. Raises ClosedError when the engine is closed meanwhile."""
        call = Call(False, self._loop.output)
        try:
            ids, failed = self._submit(call, prompts, params)
            with _bar(len(ids), progress) as bar:
                bar.update(len(failed))
                outputs: dict[int, RequestOutput] = {}
                for output in self._turns.results(call):
                    outputs[output.id] = output
                    bar.update()
        finally:
            self._turns.abandon(call)
        errors = iter(failed)
        return [outputs[i] if i is not None else next(errors) for i in ids]

    def stream(
        self, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Like generate, but yields each request's state after every token; the last one has a finish_reason. Its text only ever
        grows. Ids grow in the order of the prompts. Who is slower than the engine, while others drive it, gets the newest state.
        Leaving the loop early aborts what is left."""
        call = Call(True, self._loop.output)
        try:
            yield from self._submit(call, prompts, params)[1]
            yield from self._turns.results(call)
        finally:
            self._turns.abandon(call)

    async def astream(
        self, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> AsyncIterator[RequestOutput]:
        """stream() for asyncio: `async for output in engine.astream(...)`. A thread of the engine's own steps while any such call
        is unfinished. A task that is cancelled aborts its requests."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        call = Call(True, self._loop.output)

        def wake() -> None:
            with suppress(RuntimeError):  # the event loop has ended, and so has who waited
                loop.call_soon_threadsafe(ready.set)

        call.wake = wake
        try:
            for output in self._submit(call, prompts, params)[1]:
                yield output
            self._turns.serve(call)
            while call.pending or call.news:
                ready.clear()
                news = self._turns.pick_up(call)
                for output in news:
                    yield output
                if not news:
                    await ready.wait()
        finally:
            self._turns.abandon(call)

    def score(
        self,
        token_lists: Sequence[Prompt],
        first: int | Sequence[int] = 1,
        on_logits: OnLogits | None = None,
        progress: bool = False,
    ) -> list[Score]:
        """Log-probabilities of given tokens, read through the cache like any generation (teacher-forced, in chunks).

        first: the first token to score, of all lists or of each; positions before it may come from the prefix cache.
        on_logits(index in token_lists, start, logits [n, V]): row i predicts token start + i. Called as chunks come, each
        position exactly once, by the thread that steps, so nothing of size T x V is kept. What it raises ends the call.
        Raises RequestError before anything runs, or when a list cannot be finished.
        """
        if isinstance(self.loaded, SimulatedModel):
            raise ConfigError("a simulation has no logits to score with; use runner=default")
        scoring = Scoring(self.intake, token_lists, first, on_logits)
        call: Call[Request] = Call(False, lambda request: request)
        receivers: list[int] = []

        def claim(request: Request) -> None:
            self._turns.claim(call, request)
            self._loop.receivers[request.id] = scoring.receiver(len(receivers))
            receivers.append(request.id)

        try:
            for tokens, begin in scoring.lists:
                self.intake.add_scoring(tokens, begin, self.clock(), claim)
            with _bar(len(receivers), progress) as bar:
                for request in self._turns.results(call):
                    scoring.raise_failure(request)
                    bar.update()
        finally:
            self._turns.abandon(call)
            for request_id in receivers:
                self._loop.receivers.pop(request_id, None)
        return scoring.scores()

    def _add(self, call: Call, prompt: Prompt, params: SamplingParams | None, salt: str = "", at: float | None = None) -> int:
        now = self.clock() if at is None else at
        params = SamplingParams() if params is None else params
        return self.intake.add(prompt, params, now, salt, partial(self._turns.claim, call)).id

    def _submit(
        self, call: Call, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[int | None], list[RequestOutput]]:
        """Queue prompts. Ids in order, None where a prompt was refused; and an error output per refusal, in order."""
        try:
            prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        except TypeError:
            raise RequestError(f"prompts are a list of texts or of lists of token ids, not {shown(prompts)}") from None
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one for all, or one per prompt")
        ids: list[int | None] = []
        failed: list[RequestOutput] = []
        for prompt, p in zip(prompts, each, strict=True):
            try:
                ids.append(self._add(call, prompt, p))
            except RequestError as error:
                ids.append(None)
                self.recorder.finished("error")
                given = list(prompt) if isinstance(prompt, list | tuple) else []
                failed.append(RequestOutput(-1, given, [], "", "error", RequestMetrics(), error=str(error)))
        return ids, failed

    def _seen(self, request: Request) -> Request:
        if request.finish_reason is not None:
            self._loop.forget(request)
        return request

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[LayerShape]:
        return self._parts.adapter.layers

    def watch_steps(self, watcher: Callable[[StepPlan, float], None] | None) -> None:
        """watcher(plan, seconds) sees every step that ran; None ends it. Steps that a simulation takes at once are not seen.
        What a watcher raises ends its watching, and is raised by the next call of this."""
        with self._turns.alone():
            self._loop.on_step, failure, self._loop.watcher_failure = watcher, self._loop.watcher_failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """While active, observer(layer, q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv]) sees the queries, keys and values of every
        forward, after RoPE, unquantized and without padding. Nothing is taken from the prefix cache meanwhile: every token of
        every prompt is seen. One observer at a time. What it raises ends the request it saw, and is raised again at the end."""
        runner, manager = self._parts.runner, self.scheduler.manager
        failures: list[Exception] = []

        def guarded(layer: int, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor") -> None:
            try:
                observer(layer, q, k, v)
            except Exception as error:
                failures.append(error)
                raise

        with self._turns.alone():
            if runner.observer is not None:
                raise ConfigError("the engine is being observed already; one observer at a time")
            runner.observer, manager.reuse = guarded, False
        try:
            yield
        finally:
            with self._turns.alone():
                runner.observer, manager.reuse = None, True
        if failures:
            raise failures[0]

    def metrics(self) -> dict[str, Any]:
        """Counters and rates since the start, in the parts of an experiment record: memory, speed, cache, attention."""
        with self._turns.alone():
            return self._metrics()

    def _metrics(self) -> dict[str, Any]:
        allocator, r = self.scheduler.manager.allocator, self.recorder
        usable = allocator.num_blocks - allocator.num_reserved
        return {
            "memory": self._parts.store.memory_report()
            | summary.pool_use(r, usable, allocator.num_referenced, allocator.block_size),
            "speed": {**summary.rates(r), **self._loop.latencies.distributions()},
            "cache": summary.cache_counters(r, allocator.evictions),
            "attention": {
                "backend": self._parts.backend.name,
                "reads": self.config.attention.reads,
                "reason": self._parts.backend_reason,
                "forward": self._parts.adapter.forward_path,
            },
            "fraction_read_from_cache": r.fraction_read_from_cache,
            "scales": self._parts.scales_source,
            "warnings": self._parts.warnings,
            "requests": {
                "running": self.scheduler.num_running,
                "waiting": self.scheduler.num_waiting,
                "finished": dict(r.requests_finished),
            },
            "tokens": {"prefill": r.prefill_tokens, "decode": r.decode_tokens},
            "latency_counts": self._loop.latencies.counts(),
            "pool": self._parts.pool.arithmetic,
        }

    def reset_metrics(self) -> None:
        """Start counting anew, e.g. after a warm-up."""
        with self._turns.alone():
            vars(self.recorder).update(vars(Recorder()))
            self.scheduler.manager.allocator.evictions = 0
            self._loop.latencies = Latencies()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks nobody references, e.g. after changing the model's weights."""
        with self._turns.alone():
            self.scheduler.manager.allocator.reset_cache()

    def check(self) -> None:
        """Raise AssertionError on any broken invariant of the pool (laws 4 and 5 of LAWS.md)."""
        with self._turns.alone():
            self.scheduler.manager.check(self.scheduler.requests())
            self._parts.store.check_null()

    def left_over(self) -> dict[str, int]:
        """What requests hold, by kind. Nothing, once all of them have ended and their callers have what they asked for."""
        with self._turns.alone():
            manager = self.scheduler.manager
            return {
                "blocks": manager.allocator.num_referenced,
                "host_blocks": manager.host.num_blocks - manager.host.num_free,
                "receivers": len(self._loop.receivers),
                "outputs": self._loop.num_outputs,
                "calls": self._turns.num_unfinished,
            }

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all requests, free the pool, give the model its attention back. Calls that wait in other threads end with
        ClosedError. Safe to call twice."""
        if not self._turns.close():
            return
        with self._turns.alone():
            self._loop.end_all()
            self._parts.adapter.close()
            self._parts.store.free()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=None if progress else True, unit="request", leave=False)
