"""One step of the engine: inbox, plan, swaps, forward, sampling, outcome. Consistent after every exception.

Takes: the connected parts. Gives: the requests that advanced. Does not know about: how results are waited for.
"""

from collections.abc import Callable
from typing import Any

import torch

from qkv.assemble import Parts
from qkv.metrics.summary import Latencies
from qkv.outputs import Outputs, request_metrics
from qkv.runner import Scored, StepResult
from qkv.sampling import NOT_FINITE, Sampler, token_logprob
from qkv.scheduler import copies
from qkv.types import FinishReason, Request, RequestOutput, StepPlan

Receiver = Callable[[Scored, torch.Tensor], None]


class Loop:
    """receivers: per scoring request, who gets its logits. latencies: of finished generations. on_step: told of every step
    that ran, before its outcome is applied, and how long it took."""

    def __init__(self, parts: Parts, outputs: Outputs, seed: int, clock: Callable[[], float]) -> None:
        self.intake, self.scheduler, self._runner, self._store = parts.intake, parts.scheduler, parts.runner, parts.store
        self.recorder = parts.scheduler.recorder
        self._outputs, self._sampler, self._clock = outputs, Sampler(seed), clock
        self.receivers: dict[int, Receiver] = {}
        self._ended: list[Request] = []  # in a step that failed afterwards
        self.latencies = Latencies()
        self.on_step: Callable[[StepPlan, float], None] | None = None

    def advance(self) -> list[Request]:
        """One step; the requests that got a token or ended. After an exception, which may come from a policy, a kernel, a
        tokenizer or Ctrl-C, all that ran is prefilled again, and what had ended is in the next step's answer."""
        advanced, self._ended = self._ended + self.take_in(), []
        try:
            if not self.scheduler.idle:
                self._step(advanced)
        except BaseException:
            self._ended = [r for r in advanced if r.finish_reason is not None]
            for request in self.scheduler.roll_back():
                self._runner.forget(request)
            raise
        return advanced

    def _step(self, advanced: list[Request]) -> None:
        """Appends to `advanced` as it goes."""
        plan = self.scheduler.plan()
        self._swap(plan)
        began = self._clock()
        result = self._runner.run(plan)
        tokens = self._next_tokens(plan, result)
        now = self._clock()
        self._time(plan, now - began)
        if self.on_step is not None:
            self.on_step(plan, now - began)
        for chunk in plan.prefills:
            if chunk.request.first_scheduled is None:
                chunk.request.first_scheduled = began
        ready = self.scheduler.complete(plan)
        self.recorder.weigh_step(now - began)
        for request, token, logprob in zip(ready, *tokens, strict=True):
            if token == NOT_FINITE:
                request.error = "the model's logits are not finite (overflow, or damaged weights); try another dtype"
                self.finish(request, "error")
            elif reason := self._outputs.append(request, token, logprob, now):
                self.finish(request, reason)
            advanced.append(request)
        advanced += self._take_scores(plan, result)

    def take_in(self) -> list[Request]:
        """Empty the inbox: new requests join the queue, aborted ones end. Returns those."""
        new, aborted = self.intake.drain()
        for request in new:
            self.scheduler.add(request)
        ended = []
        if aborted:
            live = {r.id: r for r in self.scheduler.requests()}
            for request_id in aborted:
                if request_id in live and live[request_id].finish_reason is None:
                    self.finish(live[request_id], "abort")
                    ended.append(live[request_id])
        return ended

    def _swap(self, plan: StepPlan) -> None:
        """Copy preempted blocks out, then returning ones in, before the forward writes anything."""
        for request in plan.preempted:
            self._runner.forget(request)
        store, costs = self._store, self.scheduler.costs
        if plan.swap_out:
            store.reserve_host()  # once; not part of what a copy costs
        began = self._clock()
        for swaps, copy, copy_raw in (
            (plan.swap_out, store.copy_out, store.copy_raw_out),
            (plan.swap_in, store.copy_in, store.copy_raw_in),
        ):
            device, host = copies(swaps)
            if device:
                copy(device, host)
            for swap in swaps:
                if swap.raw_host:
                    copy_raw(swap.tail_slot, swap.sink_slot, swap.raw_host)
        seconds = self._clock() - began
        moved = sum(len(s.device) + len(s.raw_host) for s in (*plan.swap_out, *plan.swap_in))
        costs.count_copy(moved * store.block_bytes, seconds)

    def _next_tokens(self, plan: StepPlan, result: StepResult) -> tuple[list[int], list[Any]]:
        """A token, and log-probabilities where wanted, for each request that gets one in this step."""
        ready = list(plan.decodes) + [c.request for c in plan.prefills if c.completes and c.request.score_from is None]
        if result.tokens is not None:
            return result.tokens, [None] * len(result.tokens)
        if not ready or result.logits is None:
            return [], []
        logits = result.logits[: len(ready)]
        tokens = self._sampler.sample(logits, [(r.id, r.params) for r in ready])
        wanted = [r.params.logprobs for r in ready]
        return tokens, [None if top is None else token_logprob(logits[i], tokens[i], top) for i, top in enumerate(wanted)]

    def _take_scores(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Hand scored logits to who asked; the scoring requests that are done."""
        done = []
        for scored in result.scored:
            assert result.logits is not None
            logits = result.logits[scored.rows]
            receiver = self.receivers.get(scored.request.id)
            if receiver is not None:
                receiver(scored, logits)
            scored.request.scored_to = scored.first + len(logits)
        for chunk in plan.prefills:
            if chunk.completes and chunk.request.score_from is not None:
                self.finish(chunk.request, "length")
                done.append(chunk.request)
        return done

    def finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        self._runner.forget(request)
        self._sampler.forget(request.id)
        if request.score_from is None and reason in ("stop", "length"):
            self.latencies.add(request_metrics(request))

    def forget(self, request: Request) -> None:
        """Nobody will ask for its output."""
        self._outputs.forget(request.id)

    def output(self, request: Request) -> RequestOutput:
        output = self._outputs.output(request)
        if request.finish_reason is not None:
            self._outputs.forget(request.id)
        return output

    def _time(self, plan: StepPlan, seconds: float) -> None:
        r, decodes = self.recorder, len(plan.decodes)
        prefills = plan.num_tokens - decodes
        r.prefill_tokens += prefills
        r.decode_tokens += decodes
        if prefills and decodes:
            r.mixed_seconds += seconds
            r.mixed_prefill_tokens += prefills
            r.mixed_decode_tokens += decodes
        elif prefills:
            r.prefill_seconds += seconds
            self.scheduler.costs.count_prefill(prefills, seconds)
        else:
            r.decode_seconds += seconds
