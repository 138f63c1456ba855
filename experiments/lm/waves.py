"""Which sequences to run when, so that what they share is computed once.

Takes: token sequences, each with the requests it answers. Gives: waves to run one after the other.
Does not know about: lm-eval, engines.
"""

from collections.abc import Iterator, Sequence

import torch

from qkv.sampling import argmax
from qkv.types import SamplingParams


class Job:
    """One sequence to run. members: (request, tokens before its answer, its last token) of all requests that it answers: they
    are equal up to the last token. A generation answers one, after all its tokens."""

    def __init__(self, tokens: list[int], request: int | None = None, params: SamplingParams | None = None) -> None:
        self.tokens, self.params = tokens, params
        self.members: list[tuple[int, int, int]] = [] if request is None else [(request, len(tokens), -1)]
        self._last: torch.Tensor | None = None

    def add(self, request: int, answer: Sequence[int]) -> None:
        self.members.append((request, len(self.tokens) - len(answer), answer[-1]))

    @property
    def first(self) -> int:
        """The first token that any member wants scored. Whatever comes before its predecessor may come from the prefix cache."""
        return min(start for _, start, _ in self.members)

    def keep_last(self, start: int, logits: torch.Tensor) -> None:
        """logits [n, V]: row i predicts token start + i. The last row serves every member's last token."""
        if start + len(logits) == len(self.tokens) and len(self.members) > 1:
            self._last = logits[-1].float().log_softmax(-1).cpu()

    def results(self, logprobs: torch.Tensor, greedy: torch.Tensor) -> Iterator[tuple[int, tuple[float, bool]]]:
        """(request, (log-probability, whether greedy)) of every member. logprobs, greedy: of self.tokens from `first` on."""
        best = None if self._last is None else int(argmax(self._last[None])[0])
        for request, start, last in self.members:
            own, hits = logprobs[start - self.first :], greedy[start - self.first :]
            if self._last is None or last == self.tokens[-1]:
                yield request, (float(own.sum()), bool(hits.all()))
            else:
                yield request, (float(own[:-1].sum() + self._last[last]), bool(hits[:-1].all()) and best == last)


def plans(jobs: Sequence[Job], block_size: int, pool_tokens: int) -> Iterator[list[list[Job]]]:
    """All jobs, in plans of waves. A sequence that begins with whole blocks of an earlier one is in a later wave than that.

    Sequences that begin alike are planned together, at most as many as half fill the pool, since a block that was evicted before
    its wave came would be computed twice. The plan depends on the tokens alone, so every quantizer runs the same one.
    """
    room = max(1, pool_tokens // block_size // 2)
    computed: dict[int, int] = {}  # hash of a beginning, in whole blocks -> the wave that computes it
    plan: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: job.tokens):
        beginnings = _beginnings(job.tokens, block_size)
        if plan and len(computed) + sum(b not in computed for b in beginnings) > room:
            yield plan
            computed, plan = {}, []
        reusable = beginnings[: (job.first - 1) // block_size]
        wave = 1 + max((computed[b] for b in reusable if b in computed), default=-1)
        for beginning in beginnings:
            computed.setdefault(beginning, wave)
        plan += [[] for _ in range(wave + 1 - len(plan))]
        plan[wave].append(job)
    if plan:
        yield plan


def _beginnings(tokens: list[int], block_size: int) -> list[int]:
    """A hash of tokens[:block_size], tokens[:2 * block_size] and so on, of what is stored: all but the last token."""
    chain, out = 0, []
    for end in range(block_size, len(tokens), block_size):
        chain = hash((chain, *tokens[end - block_size : end]))
        out.append(chain)
    return out
