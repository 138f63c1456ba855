"""The door: prompts become requests, or a RequestError that says what is wrong. Any thread may come.

Takes: text or token ids. Gives: requests, drained by the thread that steps. Does not know about: blocks, steps, who waits.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from typing import Any

from qkv.errors import RequestError
from qkv.types import Request, SamplingParams

Prompt = str | Sequence[int]
Claim = Callable[[Request], None]
MOST_STOPS = 1000  # stop strings of a request: each is looked for after each token, in the step of everybody


class Intake:
    """Validates at the door, so that whatever is queued can be served.

    max_model_len: tokens per request, prompt and output. pool_tokens: tokens of the largest request the pool holds.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int, pool_tokens: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.max_model_len, self.pool_tokens = max_model_len, pool_tokens
        self._lock = threading.RLock()  # taken again where garbage collection ends a stream while we append
        self._encoding = threading.Lock()  # a tokenizer that truncates or pads changes itself while it encodes
        self._special = special_tokens(tokenizer)
        self._next_id = 0
        self._new: list[Request] = []
        self._aborted: list[int] = []

    def add(self, prompt: Prompt, params: SamplingParams, now: float, salt: str, claim: Claim) -> Request:
        """Queue a generation. claim(request) is called before a step can see the request. Raises RequestError."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters are a SamplingParams, not {shown(params)}")
        if not isinstance(salt, str) or not encodable(salt):
            raise RequestError(f"salt={shown(salt)} is not allowed; it must be text that UTF-8 can encode")
        if not isinstance(now, int | float) or isinstance(now, bool) or not math.isfinite(now):
            raise RequestError(f"arrival={shown(now)} is not allowed; it must be a finite time of the engine's clock, or None")
        params = self._stops(params)
        tokens = self.tokens(prompt)
        n = len(tokens)
        limit = min(self.max_model_len, self.pool_tokens + 1)  # the last token sampled is never stored
        if n >= self.max_model_len:
            raise RequestError(
                f"the prompt has {n} tokens; the model takes at most {self.max_model_len - 1}, as one more is needed"
            )
        if n > self.pool_tokens:
            raise RequestError(
                f"the prompt has {n} tokens; the KV pool holds {self.pool_tokens}: enlarge it or shorten the prompt"
            )
        max_tokens = limit - n if params.max_tokens is None else params.max_tokens
        if n + max_tokens > limit:
            what = "the model's limit" if limit == self.max_model_len else "what the KV pool holds for one request"
            raise RequestError(
                f"prompt {n} + max_tokens {max_tokens} = {n + max_tokens} tokens, above {what} ({limit}); "
                f"max_tokens can be at most {limit - n}"
            )
        return self._queue(tokens, params, max_tokens, now, None, salt, claim)

    def add_scoring(self, tokens: list[int], first: int, now: float, claim: Claim) -> Request:
        """Queue a scoring request for tokens first.. of what scoring_tokens() let through."""
        return self._queue(tokens, SamplingParams(max_tokens=1), 0, now, first, "", claim)

    def _stops(self, params: SamplingParams) -> SamplingParams:
        """The same, where stop strings that are special tokens are looked for by id: the text leaves such tokens out."""
        if not params.stop:
            return params
        if self.tokenizer is None:
            raise RequestError(f"stop={shown(params.stop)} needs a tokenizer, which this model has not; use stop_token_ids")
        if len(params.stop) > MOST_STOPS:
            raise RequestError(f"{len(params.stop)} stop strings are given; a request may have {MOST_STOPS}")
        for stop in params.stop:
            inside = next((token for token in self._special if token in stop and token != stop), None)
            if inside is not None:
                raise RequestError(
                    f"stop={shown(stop)} can never be met: the text leaves out the special token '{inside}'; "
                    "use that token alone, or the text without it"
                )
        ids = tuple(self._special[stop] for stop in params.stop if stop in self._special)
        return replace(params, stop_token_ids=(*params.stop_token_ids, *ids)) if ids else params

    def scoring_tokens(self, prompt: Prompt, first: int) -> list[int]:
        """Token ids of a prompt to score from `first` on, validated. Raises RequestError."""
        tokens = self.tokens(prompt)
        if isinstance(first, bool) or not hasattr(first, "__index__") or not 1 <= index(first) < len(tokens):
            raise RequestError(f"first={shown(first)} is not allowed for {len(tokens)} tokens; it must be 1 to {len(tokens) - 1}")
        limit = min(self.max_model_len, self.pool_tokens) + 1  # the last token is predicted, and never stored
        if len(tokens) > limit:
            raise RequestError(
                f"{len(tokens)} tokens to score, above {limit}: the model takes {self.max_model_len}, the KV pool holds "
                f"{self.pool_tokens}, and the last one is only predicted"
            )
        return tokens

    def abort(self, request_id: int) -> None:
        """Takes effect before the next step. Unknown and finished ids are ignored."""
        with self._lock:
            self._aborted.append(request_id)

    def drain(self) -> tuple[list[Request], list[int]]:
        """New requests in order of arrival, and ids to abort. The stepping thread."""
        with self._lock:
            new, aborted = self._new, self._aborted
            self._new, self._aborted = [], []
        return new, aborted

    @property
    def empty(self) -> bool:
        return not (self._new or self._aborted)

    def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, validated."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: give token ids, or pass tokenizer= to Engine.create")
            try:
                with self._encoding:
                    tokens = list(self.tokenizer(prompt)["input_ids"])
            except Exception as error:
                why = "it holds half of a surrogate pair" if not encodable(prompt) else f"{type(error).__name__}: {error}"
                raise RequestError(f"the tokenizer cannot encode the prompt {shown(prompt)}: {why}") from None
        else:
            tokens = token_ids(prompt)
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            bad = next(t for t in tokens if not 0 <= t < self.vocab_size)
            raise RequestError(f"token id {bad} is outside the vocabulary; ids go from 0 to {self.vocab_size - 1}")
        return tokens

    def _queue(
        self,
        tokens: list[int],
        params: SamplingParams,
        max_tokens: int,
        now: float,
        score_from: int | None,
        salt: str,
        claim: Claim,
    ) -> Request:
        with self._lock:
            request = Request(self._next_id, len(tokens), tokens, params, max_tokens, now, score_from, salt)
            claim(request)
            self._next_id += 1
            self._new.append(request)
        return request


def token_ids(prompt: Any) -> list[int]:
    """Whole numbers of any integer type, in anything that has an order: lists, arrays, tensors. Raises RequestError."""
    try:
        if isinstance(prompt, bytes | bytearray | set | frozenset | dict):
            raise TypeError
        given = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if any(isinstance(t, bool) for t in given):
            raise TypeError
        return [index(t) for t in given]
    except TypeError:
        raise RequestError(
            f"a prompt is text or a list of token ids, not {shown(prompt)}; several prompts are a list of those"
        ) from None


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that decoding leaves out, by their text."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {str(token): int(i) for i, token in added.items() if getattr(token, "special", False)}


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """For a message: one line, not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else f"{text[:57]}..."
