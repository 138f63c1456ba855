"""The engine: wires model, pool, policies and scheduler, and turns the handle. Decides nothing itself.

The life of a request, in call order: intake -> scheduler (block manager, preemptor) -> runner (attention backend, store)
-> sampler -> outputs. One thread steps; add_request and abort may come from any thread.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from qkv.assemble import Parts, assemble, build_policies, usable_scales
from qkv.attention.base import Observer
from qkv.config import EngineConfig
from qkv.errors import ConfigError, RequestError
from qkv.intake import Intake, Prompt
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
from qkv.types import Request, RequestMetrics, RequestOutput, SamplingParams, StepPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine:
    """Generation and scoring on a paged, quantized KV cache. Make one with `Engine.create` or `Engine.from_config`;
    close it (or use it in a `with`) to give a passed-in model its own attention back."""

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
        self._unclaimed: list[Request] = []  # ended while somebody else was driving the loop
        self._closed = False
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
        """Queue a prompt (text or token ids); returns its id. Any thread. Raises RequestError. salt separates prefix caches.

        arrival: when it came, by the engine's clock, where that was during a step; None means now. Times count from it.
        """
        now = self.clock() if arrival is None else arrival
        return self.intake.add(prompt, params or SamplingParams(), now, salt).id

    def abort(self, request_id: int) -> None:
        """End a request, whatever its state; its blocks are back before the next step. Any thread."""
        self.intake.abort(request_id)

    @property
    def has_work(self) -> bool:
        return not (self.intake.empty and self.scheduler.idle and not self._unclaimed)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the state of every request that got a token or ended."""
        advanced = self._loop.advance()
        ended_elsewhere, self._unclaimed = self._unclaimed, []
        return [self._loop.output(request) for request in ended_elsewhere + advanced]

    def advance(self) -> list[Request]:
        """step() for those who measure: no outputs are made, and a simulation takes alike steps at once. Returns the requests
        that got a token or ended, to read and not to change."""
        requests = self._loop.advance()
        for request in requests:
            if request.finish_reason is not None:
                self._loop.forget(request)
        return requests

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue all prompts; results in their order. A prompt that cannot be served gives an output with
        finish_reason "error" and the reason in `error`; the others finish. progress: a bar, if stderr is a terminal."""
        outputs: dict[int, RequestOutput] = {}
        ids, failed = self._submit(prompts, params)
        with _bar(len(ids), progress) as bar:
            bar.update(len(failed))
            for request in self._drive({i for i in ids if i is not None}):
                if request.finish_reason is not None:
                    outputs[request.id] = self._loop.output(request)
                    bar.update()
        errors = iter(failed)
        return [outputs[i] if i is not None else next(errors) for i in ids]

    def stream(
        self, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Like generate, but yields each request's state after every token; the last one has a finish_reason. Ids are
        consecutive in the order of the prompts. Leaving the loop early aborts what is left."""
        ids, failed = self._submit(prompts, params)
        yield from failed
        for request in self._drive({i for i in ids if i is not None}):
            yield self._loop.output(request)

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
        position exactly once, so nothing of size T x V is kept. Raises RequestError before anything runs.
        """
        scoring, requests = Scoring(self.intake, token_lists, first, on_logits), list[Request]()
        try:
            for index, (tokens, begin) in enumerate(scoring.lists):
                requests.append(self.intake.add_scoring(tokens, begin, self.clock()))
                self._loop.receivers[requests[-1].id] = scoring.receiver(index)
            with _bar(len(requests), progress) as bar:
                for request in self._drive({r.id for r in requests}):
                    bar.update(request.finish_reason is not None)
        finally:
            for request in requests:
                self._loop.receivers.pop(request.id, None)
                self.abort(request.id)
        return scoring.scores()

    def _submit(
        self, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[int | None], list[RequestOutput]]:
        """Queue prompts. Ids in order, None where a prompt was refused; and an error output per refusal, in order."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one for all, or one per prompt")
        ids: list[int | None] = []
        failed: list[RequestOutput] = []
        for prompt, p in zip(prompts, each, strict=True):
            try:
                ids.append(self.add_request(prompt, p))
            except RequestError as error:
                ids.append(None)
                self.recorder.finished("error")
                given = list(prompt) if isinstance(prompt, list | tuple) else []
                failed.append(RequestOutput(-1, given, [], "", "error", RequestMetrics(), error=str(error)))
        return ids, failed

    def _drive(self, mine: set[int]) -> Iterator[Request]:
        """Step until all of `mine` ended, yielding them as they advance. Aborts the rest if the consumer leaves."""
        pending = set(mine)
        try:
            while pending:
                ended_elsewhere = [r for r in self._unclaimed if r.id in pending]  # somebody else drove the loop meanwhile
                self._unclaimed = [r for r in self._unclaimed if r.id not in pending]
                advanced = ended_elsewhere or self._loop.advance()
                self._unclaimed += [r for r in advanced if r.id not in mine and r.finish_reason is not None]
                for request in advanced:
                    if request.id in pending:
                        if request.finish_reason is not None:
                            pending.discard(request.id)
                        yield request
        finally:
            for request_id in pending:
                self.abort(request_id)
            for request in self._loop.take_in():
                if request.id in mine:
                    self._loop.forget(request)
                else:
                    self._unclaimed.append(request)

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[LayerShape]:
        return self._parts.adapter.layers

    def watch_steps(self, watcher: Callable[[StepPlan, float], None] | None) -> None:
        """watcher(plan, seconds) sees every step that ran; None ends it. Steps that a simulation takes at once are not seen."""
        self._loop.on_step = watcher

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """While active, observer(layer, q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv]) sees the queries, keys and values of every
        forward, after RoPE, unquantized and without padding. Nothing is taken from the prefix cache meanwhile: every token of
        every prompt is seen."""
        runner, manager = self._parts.runner, self.scheduler.manager
        runner.observer, manager.reuse = observer, False
        try:
            yield
        finally:
            runner.observer, manager.reuse = None, True

    def metrics(self) -> dict[str, Any]:
        """Counters and rates since the start, in the parts of an experiment record: memory, speed, cache, attention."""
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
        fresh = Recorder()
        for name in vars(fresh):
            setattr(self.recorder, name, getattr(fresh, name))
        self.scheduler.manager.allocator.evictions = 0
        self._loop.latencies = Latencies()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks nobody references, e.g. after changing the model's weights."""
        self.scheduler.manager.allocator.reset_cache()

    def check(self) -> None:
        """Raise AssertionError on any broken invariant of the pool (laws 4 and 5 of LAWS.md). Between steps."""
        self.scheduler.manager.check(self.scheduler.requests())
        self._parts.store.check_null()

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all requests, free the pool, give the model its attention back. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.take_in()
        for request in list(self.scheduler.requests()):
            self._loop.finish(request, "abort")
        self._parts.adapter.close()
        self._parts.store.free()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=None if progress else True, unit="request", leave=False)
