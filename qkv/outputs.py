"""What a request has produced: new tokens, stop conditions, text, metrics.

Takes: a sampled token. Gives: a finish reason or None, and RequestOutput on demand. Does not know about: blocks, steps.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from qkv.sampling import Detokenizer, StopSearch
from qkv.types import FinishReason, Request, RequestMetrics, RequestOutput, TokenLogprob


@dataclass(slots=True)
class _State:
    detokenizer: Detokenizer
    stops: StopSearch
    text: str | None = None  # set when a stop string cut it
    shown: str = ""  # the text of the last output
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Outputs:
    """One state per unfinished request."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._eos = tokenizer, eos_token_ids
        self._states: dict[int, _State] = {}

    def append(self, request: Request, token: int, logprob: TokenLogprob | None, now: float) -> FinishReason | None:
        """Add a token; why the request ends here, if it does. The stop token belongs to token_ids, not to the text."""
        request.token_ids.append(token)
        request.token_times.append(now)
        if logprob is not None:
            self._state(request).logprobs.append(logprob)
        params = request.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return "stop"
        if params.stop:
            state = self._state(request)
            text = state.detokenizer.update(request.token_ids[request.prompt_len :])
            if state.stops.found(text):
                state.text = text[: state.stops.safe]
                return "stop"
        if len(request.token_ids) - request.prompt_len >= request.max_tokens:
            return "length"
        return None

    def output(self, request: Request) -> RequestOutput:
        """The request as it stands; final when it has a finish_reason. Until then text that may be the beginning of a stop
        string is held back, so that no text is ever taken back."""
        state = self._state(request)
        tokens = request.token_ids[request.prompt_len :]
        if state.text is None:
            shown = tokens
            if request.finish_reason == "stop" and tokens:  # a stop string would have set the text
                shown = tokens[:-1]
            done = request.finish_reason is not None
            text = state.detokenizer.finish(shown) if done else state.detokenizer.update(shown)
            if request.params.stop and not done:
                text = text[: state.stops.safe]
        else:
            text = state.text
        state.shown = text
        return self._as_it_stands(request, state)

    def broken(self, request: Request) -> RequestOutput:
        """Where output() raised: the end of the request, with the text that was there before."""
        return replace(self._as_it_stands(request, self._state(request)), finish_reason="error")

    def _as_it_stands(self, request: Request, state: _State) -> RequestOutput:
        return RequestOutput(
            id=request.id,
            prompt_token_ids=request.token_ids[: request.prompt_len],
            token_ids=request.token_ids[request.prompt_len :],
            text=state.shown,
            finish_reason=request.finish_reason,
            metrics=request_metrics(request),
            logprobs=list(state.logprobs) if request.params.logprobs is not None else None,
            error=request.error,
        )

    def __len__(self) -> int:
        return len(self._states)

    def forget(self, request_id: int) -> None:
        self._states.pop(request_id, None)

    def _state(self, request: Request) -> _State:
        if request.id not in self._states:
            self._states[request.id] = _State(Detokenizer(self._tokenizer), StopSearch(request.params.stop))
        return self._states[request.id]


def request_metrics(request: Request) -> RequestMetrics:
    """Times in seconds since arrival; tpot is the mean over the tokens after the first."""
    times = request.token_times
    metrics = RequestMetrics(cached_tokens=request.cached_tokens, preemptions=request.preemptions)
    if request.first_scheduled is not None:
        metrics.queue_time = request.first_scheduled - request.arrival
    if times:
        metrics.ttft = times[0] - request.arrival
        metrics.e2e = times[-1] - request.arrival
        metrics.itl = [b - a for a, b in pairwise(times)]
    if len(times) > 1:
        metrics.tpot = (times[-1] - times[0]) / (len(times) - 1)
    return metrics
