"""KL, agreement and standard errors against a direct computation from whole logits."""

import math
from typing import Any, NamedTuple

import torch

from experiments.measuring.divergence import Accuracy, score_document

V = 50


class FakeScore(NamedTuple):
    logprobs: torch.Tensor


class FakeEngine:
    """Logits that depend on the token, handed over in uneven chunks from one reused buffer."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def logits(self, tokens: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tokens[1])
        base = torch.randn(len(tokens) - 1, V, generator=generator)
        return base + self.noise * torch.randn(base.shape, generator=generator)

    def score(self, token_lists: list[list[int]], first: int, on_logits: Any) -> list[FakeScore]:
        (tokens,) = token_lists
        logits, buffer = self.logits(tokens), torch.empty(200, V)
        start = 0
        for size in (1, 7, 200, 150):
            part = logits[start : start + size]
            buffer[: len(part)] = part
            if len(part):
                on_logits(0, first + start, buffer[: len(part)])
            start += size
        return [FakeScore(logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])]


def test_accuracy_equals_the_direct_computation() -> None:
    documents = [[(i * k) % V for i in range(n)] for n, k in ((300, 3), (180, 7), (240, 11))]
    baseline: Any = FakeEngine(0.0)
    other: Any = FakeEngine(0.3)
    own, accuracy = Accuracy(), Accuracy()
    for document in documents:
        score_document(document, baseline, [(other, accuracy)], own)
    p = torch.cat([baseline.logits(d) for d in documents]).double().log_softmax(-1)
    q = torch.cat([other.logits(d) for d in documents]).double().log_softmax(-1)
    targets = torch.tensor([t for d in documents for t in d[1:]])
    kl = (p.exp() * (p - q)).sum(-1)
    nll_p, nll_q = (-x.gather(1, targets[:, None])[:, 0] for x in (p, q))
    part = accuracy.part({"fraction_read_from_cache": 1.0})
    assert part["tokens_scored"] == 717
    assert math.isclose(part["kl_divergence"], float(kl.mean()), rel_tol=1e-5)
    assert part["top1_agreement"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert math.isclose(part["perplexity"], math.exp(float(nll_q.mean())), rel_tol=1e-5)
    assert math.isclose(
        part["perplexity_delta_pct"], 100 * (math.exp(float(nll_q.mean() - nll_p.mean())) - 1), rel_tol=1e-4, abs_tol=1e-6
    )
    off = torch.stack([(some - kl.mean()).sum() for some in kl.split([299, 179, 239])])  # documents are the independent units
    stderr = float((1.5 * off.square().sum()).sqrt()) / 717
    assert 0.0001 < stderr < part["kl_divergence"]
    assert math.isclose(part["kl_divergence_stderr"], stderr, rel_tol=1e-4)
    mine = own.part({"fraction_read_from_cache": None})
    assert (mine["kl_divergence"], mine["perplexity_delta_pct"], mine["top1_agreement"]) == (0.0, 0.0, 1.0)
    assert "fraction_read_from_cache" not in mine


def test_one_document_has_no_standard_error() -> None:
    engine: Any = FakeEngine(0.0)
    own = Accuracy()
    score_document([1, 2, 3], engine, [], own)
    assert "kl_divergence_stderr" not in own.part({"fraction_read_from_cache": 1.0})
