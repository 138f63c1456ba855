"""Log-probabilities of given tokens: what one call of `Engine.score` asks for, and what it has got so far.

Takes: token lists; logits, as steps produce them. Gives: a Score per list. Does not know about: steps, the cache.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from qkv.errors import ConfigError, QkvError, RequestError
from qkv.intake import Intake, Prompt, shown
from qkv.loop import Receiver
from qkv.runner import Scored
from qkv.sampling import SCORED_ROWS, argmax
from qkv.types import Request

OnLogits = Callable[[int, int, torch.Tensor], None]  # (index of the list, start, logits [n, V]): row i predicts token start + i


class Score(NamedTuple):
    """Of tokens first..T-1. logprobs [T-first] float32; greedy_match [T-first] bool: the token was the most likely one."""

    logprobs: torch.Tensor
    greedy_match: torch.Tensor


class Scoring:
    """The token lists of one call, checked, and their scores as far as they have come. Raises RequestError, ConfigError."""

    def __init__(
        self, intake: Intake, token_lists: Sequence[Prompt], first: int | Sequence[int], on_logits: OnLogits | None
    ) -> None:
        token_lists = [token_lists] if isinstance(token_lists, str) else list(token_lists)
        firsts = [first] * len(token_lists) if not isinstance(first, Iterable) else list(first)
        if len(firsts) != len(token_lists):
            raise ConfigError(f"{len(token_lists)} token lists but {len(firsts)} values of first; give one for all, or one each")
        self.lists = [(intake.scoring_tokens(t, f), f) for t, f in zip(token_lists, firsts, strict=True)]
        if on_logits is not None and not callable(on_logits):
            raise ConfigError(f"on_logits={shown(on_logits)} is not allowed; it must be a function of (index, start, logits)")
        self._on_logits = on_logits
        self._callback_failure: Exception | None = None
        self._parts: list[list[Score]] = [[] for _ in self.lists]

    def receiver(self, index: int) -> Receiver:
        """Who takes the logits of list `index`."""

        def take(scored: Scored, logits: torch.Tensor) -> None:
            targets = torch.tensor(scored.request.token_ids[scored.first : scored.first + len(logits)], device=logits.device)
            for rows, wanted in zip(logits.split(SCORED_ROWS), targets.split(SCORED_ROWS), strict=True):
                exact = rows.float()
                logprobs = exact.log_softmax(-1).gather(1, wanted[:, None])[:, 0].cpu()
                self._parts[index].append(Score(logprobs, (argmax(exact) == wanted).cpu()))
            if self._on_logits is not None:
                try:
                    self._on_logits(index, scored.first, logits)
                except Exception as error:
                    self._callback_failure = error
                    raise

        return take

    def raise_failure(self, request: Request) -> None:
        """If the request did not come to its end, what the caller is told: its callback's own exception, or a RequestError."""
        if request.finish_reason == "length":
            return
        if request.failure is not None and (request.failure is self._callback_failure or isinstance(request.failure, QkvError)):
            raise request.failure
        raise RequestError(request.error or "scoring was aborted") from request.failure

    def scores(self) -> list[Score]:
        """In the order of the lists, all of which have ended."""
        return [
            Score(torch.cat([p.logprobs for p in parts]), torch.cat([p.greedy_match for p in parts])) for parts in self._parts
        ]
