"""The door: prompts become requests, or a RequestError that says what is wrong. The only part other threads may touch.

Takes: text or token ids. Gives: requests, drained by the stepping thread. Does not know about: blocks, steps.
"""

import threading
from collections.abc import Sequence
from operator import index
from typing import Any

from qkv.errors import RequestError
from qkv.types import Request, SamplingParams

Prompt = str | Sequence[int]


class Intake:
    """Validates at the door, so that whatever is queued can be served.

    max_model_len: tokens per request, prompt and output. pool_tokens: tokens of the largest request the pool holds.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int, pool_tokens: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.max_model_len, self.pool_tokens = max_model_len, pool_tokens
        self._lock = threading.Lock()
        self._next_id = 0
        self._new: list[Request] = []
        self._aborted: list[int] = []

    def add(self, prompt: Prompt, params: SamplingParams, now: float, salt: str = "") -> Request:
        """Queue a generation. Any thread. Raises RequestError."""
        tokens = self.tokens(prompt)
        n = len(tokens)
        if params.stop and self.tokenizer is None:
            raise RequestError(f"stop={params.stop!r} needs a tokenizer, which this model has not; use stop_token_ids")
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
        return self._queue(tokens, params, max_tokens, now, None, salt)

    def add_scoring(self, tokens: list[int], first: int, now: float) -> Request:
        """Queue a scoring request for tokens first.. of what scoring_tokens() let through."""
        return self._queue(tokens, SamplingParams(max_tokens=1), 0, now, first, "")

    def scoring_tokens(self, prompt: Prompt, first: int) -> list[int]:
        """Token ids of a prompt to score from `first` on, validated. Raises RequestError."""
        tokens = self.tokens(prompt)
        if not 1 <= first < len(tokens):
            raise RequestError(f"first={first} is not allowed for {len(tokens)} tokens; it must be 1 to {len(tokens) - 1}")
        limit = min(self.max_model_len, self.pool_tokens) + 1  # the last token is predicted, and never stored
        if len(tokens) > limit:
            raise RequestError(
                f"{len(tokens)} tokens to score, above {limit}: the model takes {self.max_model_len}, the KV pool holds "
                f"{self.pool_tokens}, and the last one is only predicted"
            )
        return tokens

    def abort(self, request_id: int) -> None:
        """Any thread; takes effect before the next step. Unknown and finished ids are ignored."""
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
            tokens = list(self.tokenizer(prompt)["input_ids"])
        else:
            try:
                tokens = [index(t) for t in prompt]
            except TypeError:
                shown = repr(prompt) if len(repr(prompt)) < 60 else f"{repr(prompt)[:57]}..."
                raise RequestError(
                    f"a prompt is text or a list of token ids, not {shown}; several prompts are a list of those"
                ) from None
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            bad = next(t for t in tokens if not 0 <= t < self.vocab_size)
            raise RequestError(f"token id {bad} is outside the vocabulary; ids go from 0 to {self.vocab_size - 1}")
        return tokens

    def _queue(
        self, tokens: list[int], params: SamplingParams, max_tokens: int, now: float, score_from: int | None, salt: str
    ) -> Request:
        with self._lock:
            request = Request(self._next_id, len(tokens), tokens, params, max_tokens, now, score_from, salt)
            self._next_id += 1
            self._new.append(request)
        return request
