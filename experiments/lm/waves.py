"""Orders sequences so that the beginnings they share are computed once.

Takes: token sequences, each with the requests that it answers. Gives: rounds of waves, to be run one after the other; the
sequences of one wave run together. Does not know about: lm-eval, engines.
"""

from collections.abc import Iterator, Sequence

import torch

from qkv.sampling import argmax
from qkv.types import SamplingParams


class Job:
    """One sequence to run. members: a triple (request, tokens before its answer, its last token) for every request that the
    sequence answers; these requests are equal up to their last token. A sequence to continue answers one request, and its
    answer comes after all its tokens."""

    def __init__(self, tokens: list[int], request: int | None = None, params: SamplingParams | None = None) -> None:
        self.tokens, self.params = tokens, params
        self.members: list[tuple[int, int, int]] = [] if request is None else [(request, len(tokens), -1)]
        self._last: torch.Tensor | None = None

    def add(self, request: int, answer: Sequence[int]) -> None:
        self.members.append((request, len(self.tokens) - len(answer), answer[-1]))

    @property
    def first(self) -> int:
        """Index of the first token that any member wants scored. The tokens before its predecessor may come from the prefix
        cache."""
        return min(start for _, start, _ in self.members)

    def keep_last(self, start: int, logits: torch.Tensor) -> None:
        """Keep the row that predicts the last token, if members differ in it. logits [n, V]: row i predicts token start + i."""
        if start + len(logits) == len(self.tokens) and len(self.members) > 1:
            self._last = logits[-1].float().log_softmax(-1).cpu()

    def results(self, logprobs: torch.Tensor, greedy: torch.Tensor) -> Iterator[tuple[int, tuple[float, bool]]]:
        """(request, (its answer's log-probability, whether greedy decoding would have given the answer)) for every member.
        logprobs, greedy: of each token of self.tokens from index `first` on."""
        best = None if self._last is None else int(argmax(self._last[None])[0])
        for request, start, last in self.members:
            own, hits = logprobs[start - self.first :], greedy[start - self.first :]
            if self._last is None or last == self.tokens[-1]:
                yield request, (float(own.sum()), bool(hits.all()))
            else:
                yield request, (float(own[:-1].sum() + self._last[last]), bool(hits[:-1].all()) and best == last)


def rounds(jobs: Sequence[Job], block_size: int, pool_tokens: int) -> Iterator[list[list[Job]]]:
    """Divide all jobs into rounds; a round is a list of waves. A sequence that begins with whole blocks of another one in its
    round is in a later wave than that one.

    Sequences that begin alike are put into one round, which fills at most half of the pool: if a shared block were evicted
    before a later wave needs it, it would be computed twice. The rounds depend on the tokens alone, so every quantizer runs the
    same ones.
    """
    room = max(1, pool_tokens // block_size // 2)
    computed: dict[int, int] = {}  # hash of a beginning, in whole blocks -> the wave that computes it
    waves: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: job.tokens):
        beginnings = _beginnings(job.tokens, block_size)
        if waves and len(computed) + sum(b not in computed for b in beginnings) > room:
            yield waves
            computed, waves = {}, []
        reusable = beginnings[: (job.first - 1) // block_size]
        wave = 1 + max((computed[b] for b in reusable if b in computed), default=-1)
        for beginning in beginnings:
            computed.setdefault(beginning, wave)
        waves += [[] for _ in range(wave + 1 - len(waves))]
        waves[wave].append(job)
    if waves:
        yield waves


def _beginnings(tokens: list[int], block_size: int) -> list[int]:
    """Hashes of tokens[:block_size], tokens[:2 * block_size] and so on, within all tokens but the last, which is never stored."""
    chain, out = 0, []
    for end in range(block_size, len(tokens), block_size):
        chain = hash((chain, *tokens[end - block_size : end]))
        out.append(chain)
    return out
