"""One step of the engine: inbox, plan, swaps, forward, sampling, outcome. Consistent after every exception.

Takes: the connected parts. Gives: the requests that advanced. Does not know about: how results are waited for.

What raises while it works for one request ends that request, with the reason. A policy that raises half-way through the
bookkeeping ends the request it was asked about; the pools start over and the others are prefilled again. A forward that raises
is tried again as recovery.py says. Host memory that fails ends swapping, and nobody's request.
"""

import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from qkv.assemble import Parts
from qkv.errors import QkvError
from qkv.metrics.summary import Latencies
from qkv.outputs import Outputs, request_metrics
from qkv.recovery import Recovery
from qkv.runner import Scored, StepResult
from qkv.sampling import NOT_FINITE, Sampler, token_logprob
from qkv.scheduler import copies
from qkv.types import FinishReason, Request, RequestOutput, StepPlan, TokenLogprob

log = logging.getLogger(__name__)

Receiver = Callable[[Scored, torch.Tensor], None]
Watcher = Callable[[StepPlan, float], None]


class _ForwardFailed(Exception):
    """Carries what a forward raised, as __cause__, and who was in it."""


class _SwapFailed(Exception):
    """Carries what a copy between the pool and host memory raised, as __cause__."""


class Loop:
    """receivers: per scoring request, who gets its logits. latencies: of finished generations. on_step: told of every step
    that ran, before its outcome is applied, and how long it took."""

    def __init__(self, parts: Parts, outputs: Outputs, seed: int, clock: Callable[[], float]) -> None:
        self.intake, self.scheduler, self._runner, self._store = parts.intake, parts.scheduler, parts.runner, parts.store
        self.recorder = parts.scheduler.recorder
        self._warnings = parts.warnings
        self._outputs, self._sampler, self._clock = outputs, Sampler(seed), clock
        self._recovery = Recovery(parts.scheduler)
        self.receivers: dict[int, Receiver] = {}
        self._ended: list[Request] = []  # in a step that was interrupted afterwards
        self._to_abort: list[int] = []
        self.latencies = Latencies()
        self.on_step: Watcher | None = None
        self.watcher_failure: Exception | None = None  # what on_step raised, and was taken away for

    def advance(self) -> list[Request]:
        """One step; the requests that got a token or ended. After an interrupt (Ctrl-C) all that ran is prefilled again, and
        what had ended is in the next step's answer; every Exception is dealt with here."""
        torch.get_num_threads()  # a thread that steps for the first time takes over the process's number of threads
        advanced, self._ended = self._ended, []
        try:
            self.take_in(advanced)
            if not self.scheduler.idle:
                self._step(advanced)
        except Exception as error:
            self._recover(error, advanced)
        except BaseException:
            self._ended = [r for r in advanced if r.finish_reason is not None]
            self._start_over()
            raise
        return list({r.id: r for r in advanced}.values())

    def _step(self, advanced: list[Request]) -> None:
        """Appends to `advanced` as it goes."""
        if self._recovery.forget_ended():
            self._roll_back()
        plan = self.scheduler.plan()
        self._swap(plan)
        began = self._clock()
        ready = list(plan.decodes) + [c.request for c in plan.prefills if c.completes and c.request.score_from is None]
        try:
            result = self._runner.run(plan)
            tokens = self._next_tokens(ready, result)
        except Exception as error:
            raise _ForwardFailed(self._recovery.suspects(plan), plan.num_tokens) from error
        now = self._clock()
        self._time(plan, now - began)
        self._tell_watcher(plan, now - began)
        for chunk in plan.prefills:
            if chunk.request.first_scheduled is None:
                chunk.request.first_scheduled = began
        self.scheduler.complete(plan)
        self.recorder.weigh_step(now - began)
        for i, (request, token) in enumerate(zip(ready, tokens, strict=True)):
            self._append(request, token, None if result.logits is None else result.logits[i], now, advanced)
        self._take_scores(plan, result, advanced)
        if self._recovery.succeeded():
            self._roll_back()

    def settle(self) -> list[Request]:
        """Empty the inbox between steps; the requests that ended by it."""
        ended: list[Request] = []
        try:
            self.take_in(ended)
        except Exception as error:
            self._recover(error, ended)
        return ended

    def end_all(self) -> None:
        """The engine closes: every request ends."""
        ended = self.settle()
        for request in list(self.scheduler.requests()):
            try:
                self.finish(request, "abort", ended)
            except Exception as error:
                self._recover(error, ended)

    # -- what a step is made of --------------------------------------------------------------------------------------

    def take_in(self, ended: list[Request]) -> None:
        """Empty the inbox: new requests join the queue, aborted ones end and are appended to `ended`."""
        new, aborted = self.intake.drain()
        for request in new:
            self.scheduler.add(request)
        self._to_abort += aborted
        live = {r.id: r for r in self.scheduler.requests()} if self._to_abort else {}
        while self._to_abort:
            found = live.get(self._to_abort.pop(0))
            if found is not None:
                self.finish(found, "abort" if found.error is None else "error", ended)

    def _swap(self, plan: StepPlan) -> None:
        """Copy preempted blocks out, then returning ones in, before the forward writes anything."""
        for request in plan.preempted:
            self._runner.forget(request)
        store, costs = self._store, self.scheduler.costs
        try:
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
        except Exception as error:
            raise _SwapFailed from error
        moved = sum(len(s.device) + len(s.raw_host) for s in (*plan.swap_out, *plan.swap_in))
        costs.count_copy(moved * store.block_bytes, seconds)

    def _next_tokens(self, ready: list[Request], result: StepResult) -> list[int | Exception]:
        """A token for each, or the exception that drawing it raised."""
        if result.tokens is not None:
            return list(result.tokens)
        if not ready or result.logits is None:
            return []
        return self._sampler.sample(result.logits[: len(ready)], [(r.id, r.params, len(r.token_ids)) for r in ready])

    def _append(
        self, request: Request, token: int | Exception, logits: torch.Tensor | None, now: float, advanced: list[Request]
    ) -> None:
        """Give the request its token. Whatever fails on the way ends it, and it alone."""
        reason: FinishReason | None = "error"
        if token == NOT_FINITE:
            request.error = "the model's logits are not finite (overflow, or damaged weights); try another dtype"
        elif isinstance(token, Exception):
            blame(request, "sampling", token)
        else:
            try:
                logprob: TokenLogprob | None = None
                if request.params.logprobs is not None and logits is not None:
                    logprob = token_logprob(logits, token, request.params.logprobs)
                reason = self._outputs.append(request, token, logprob, now)
            except Exception as error:
                blame(request, "its output", error)
        if reason is None:
            advanced.append(request)
        else:
            self.finish(request, reason, advanced)

    def _take_scores(self, plan: StepPlan, result: StepResult, advanced: list[Request]) -> None:
        """Hand scored logits to who asked, and end the scoring requests that are done."""
        for scored in result.scored:
            assert result.logits is not None
            logits = result.logits[scored.rows]
            receiver = self.receivers.get(scored.request.id)
            try:
                if receiver is not None:
                    receiver(scored, logits)
                scored.request.scored_to = scored.first + len(logits)
            except Exception as error:
                blame(scored.request, "what takes its logits", error)
                self.finish(scored.request, "error", advanced)
        for chunk in plan.prefills:
            if chunk.completes and chunk.request.score_from is not None:
                self.finish(chunk.request, "length", advanced)

    def finish(self, request: Request, reason: FinishReason, ended: list[Request]) -> None:
        """End it, once, and append it to `ended`."""
        if request.finish_reason is not None:
            return
        self.scheduler.finish(request, reason)
        ended.append(request)
        self._runner.forget(request)
        if request.score_from is None and reason in ("stop", "length"):
            self.latencies.add(request_metrics(request))

    # -- after a failure ---------------------------------------------------------------------------------------------

    def _recover(self, error: Exception, ended: list[Request]) -> None:
        """The step failed. Whoever is to blame ends, and is appended to `ended`; everybody else waits to be prefilled again."""
        cause = error.__cause__
        if isinstance(error, _ForwardFailed) and isinstance(cause, Exception):
            suspects, tokens = error.args
            self._roll_back()
            guilty, what, error = self._recovery.failed(suspects, tokens, cause), "its forward", cause
        elif isinstance(error, _SwapFailed) and isinstance(cause, Exception):
            self._roll_back()
            self.scheduler.stop_swapping()
            guilty, what, error = [], "swapping", cause
            self._warnings.append(f"requests are not swapped any more, but recomputed: {describe('swapping', cause)}")
        else:
            current = self.scheduler.current
            running = list(self.scheduler.running)
            everyone = self._start_over()
            guilty, what = [current] if current is not None else running or everyone[:1], "a policy, or the bookkeeping,"
        ending = f"requests {', '.join(str(r.id) for r in guilty)} end: " if guilty else "it is tried again: "
        log.warning("a step failed; %s%s", ending, describe(what, error))
        log.debug("the step that failed", exc_info=error)
        for request in guilty:
            if request.finish_reason is None:
                blame(request, what, error)
                self.finish(request, "error", ended)

    def _roll_back(self) -> None:
        """All that runs, and what this step swapped out, waits to be prefilled again; what is cached stays."""
        try:
            for request in self.scheduler.roll_back():
                self._runner.forget(request)
        except Exception:
            self._start_over()

    def _start_over(self) -> list[Request]:
        """Like _roll_back, where the bookkeeping itself cannot be trusted: nothing stays. Returns all unfinished requests."""
        everyone = self.scheduler.start_over()
        for request in everyone:
            self._runner.forget(request)
        return everyone

    def _tell_watcher(self, plan: StepPlan, seconds: float) -> None:
        if self.on_step is not None:
            try:
                self.on_step(plan, seconds)
            except Exception as error:
                self.on_step, self.watcher_failure = None, error

    # -- results -----------------------------------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        """Requests of which text or log-probabilities are kept."""
        return len(self._outputs)

    def forget(self, request: Request) -> None:
        """Nobody will ask for its output."""
        self._outputs.forget(request.id)

    def output(self, request: Request) -> RequestOutput:
        """The request as it stands. One whose text cannot be made ends with that."""
        try:
            output = self._outputs.output(request)
        except Exception as error:
            blame(request, "its text", error)
            self.intake.abort(request.id)  # before the next step, if it still runs
            output = self._outputs.broken(request)
        if output.finish_reason is not None:
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


def blame(request: Request, what: str, error: Exception) -> None:
    """This is what the request ends with."""
    request.error, request.failure = describe(what, error), error


def describe(what: str, error: Exception) -> str:
    """One line for people: a message of ours as it is; of anything else what raised it, and where."""
    text = " ".join(str(error).split())
    if isinstance(error, QkvError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{what} failed: {type(error).__name__}: {text}{where}"
