"""Log-probabilities of given tokens: what one call of `Engine.score` asks for, and what it has got so far.

Takes: token lists; logits, as steps produce them. Gives: a Score per list. Does not know about: steps, the cache.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from qkv.errors import ConfigError
from qkv.intake import Intake, Prompt
from qkv.loop import Receiver
from qkv.runner import Scored
from qkv.sampling import SCORED_ROWS, argmax

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
        firsts = [first] * len(token_lists) if isinstance(first, int) else list(first)
        if len(firsts) != len(token_lists):
            raise ConfigError(f"{len(token_lists)} token lists but {len(firsts)} values of first; give one for all, or one each")
        self.lists = [(intake.scoring_tokens(t, f), f) for t, f in zip(token_lists, firsts, strict=True)]
        self._on_logits = on_logits
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
                self._on_logits(index, scored.first, logits)

        return take

    def scores(self) -> list[Score]:
        """In the order of the lists, all of which have ended."""
        return [
            Score(torch.cat([p.logprobs for p in parts]), torch.cat([p.greedy_match for p in parts])) for parts in self._parts
        ]
