"""Measures how far a quantizer moves a model from its unquantized run: both are given the same tokens and read them through the
cache, and their predictions are compared token by token.

Takes: logits and log-probabilities of the same tokens from two engines. Gives: the `accuracy` part of a row.
Does not know about: engines' insides, text, tables. Logits of a document (T x vocabulary) are dropped when it is done.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qkv.engine import Engine
from qkv.sampling import SCORED_ROWS, argmax


@dataclass
class Accuracy:
    """Sums of one quantizer. `nll` and `kl` have one sum per document, in nats, and `tokens` has its number of tokens."""

    tokens: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    baseline_nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreeing: int = 0

    def part(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The `accuracy` part of the row so far. metrics: those of the engine that scored, which has the share of keys that were
        read as stored."""
        count = sum(self.tokens)
        mean, baseline = sum(self.nll) / count, sum(self.baseline_nll) / count
        moved = [a - b for a, b in zip(self.nll, self.baseline_nll, strict=True)]
        ratio = math.exp(mean - baseline)
        out: dict[str, Any] = {
            "perplexity": math.exp(mean),
            "perplexity_delta_pct": 100 * (ratio - 1),
            "kl_divergence": sum(self.kl) / count,
            "top1_agreement": self.agreeing / count,
            "tokens_scored": count,
        }
        if (error := _standard_error(moved, self.tokens)) is not None:
            out["perplexity_delta_pct_stderr"] = 100 * ratio * error
        if (error := _standard_error(self.kl, self.tokens)) is not None:
            out["kl_divergence_stderr"] = error
        fraction = metrics["fraction_read_from_cache"]
        return out | ({} if fraction is None else {"fraction_read_from_cache": fraction})


def score_document(tokens: list[int], baseline: Engine, others: Sequence[tuple[Engine, Accuracy]], own: Accuracy) -> None:
    """Score one document with the baseline and then with every other engine, and add to their sums. The baseline's logits are
    kept in their own dtype meanwhile.

    own: the sums of the baseline itself. Raises what engine.score raises.
    """
    kept: list[torch.Tensor] = []
    score = baseline.score([tokens], first=1, on_logits=lambda _, __, chunk: kept.append(chunk.clone()))[0]
    logits = torch.cat(kept)
    kept.clear()
    base_nll = -float(score.logprobs.double().sum())
    _add(own, len(logits), base_nll, base_nll, 0.0, len(logits))
    for engine, accuracy in others:
        paired = _Paired(logits)
        score = engine.score([tokens], first=1, on_logits=paired)[0]
        _add(accuracy, len(logits), -float(score.logprobs.double().sum()), base_nll, paired.kl, paired.agreeing)


class _Paired:
    """Receives the logits of the second engine, as its on_logits, and compares each chunk with the baseline's rows for the same
    tokens."""

    def __init__(self, baseline: torch.Tensor) -> None:
        self.baseline, self.kl, self.agreeing = baseline, 0.0, 0

    def __call__(self, _index: int, start: int, chunk: torch.Tensor) -> None:
        for i in range(0, len(chunk), SCORED_ROWS):
            theirs = chunk[i : i + SCORED_ROWS]
            ours = self.baseline[start - 1 + i : start - 1 + i + len(theirs)]
            p, q = torch.log_softmax(ours.float(), -1), torch.log_softmax(theirs.float(), -1)
            self.kl += float(torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).double().sum())
            self.agreeing += int((argmax(ours) == argmax(theirs)).sum())


def _add(into: Accuracy, tokens: int, nll: float, baseline_nll: float, kl: float, agreeing: int) -> None:
    into.tokens.append(tokens)
    into.nll.append(nll)
    into.baseline_nll.append(baseline_nll)
    into.kl.append(kl)
    into.agreeing += agreeing


def _standard_error(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    """The standard error of the mean per token. Documents count as independent; the tokens of one document are not. None for a
    single document. sums, counts: of each document."""
    n, total = len(sums), sum(counts)
    if n < 2:
        return None
    mean = sum(sums) / total
    squares = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return math.sqrt(n / (n - 1) * squares) / total
