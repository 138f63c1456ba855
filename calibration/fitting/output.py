"""What quantized keys and values do to the output of attention, per head, while the model runs on exact ones.

Takes: Q, K, V of whole documents. Gives: squared errors per candidate and head, and how much attention the first tokens get.
Does not know about: how candidates were chosen, what the errors are used for.
"""

from collections.abc import Sequence

import torch

from qkv.layout import LayerShape, Side
from qkv.policies.quantizer.base import Quantizer

FIRST = 8  # positions whose share of attention is reported


class OutputErrors:
    """An observer. candidates: ("k" | "v" | "kv", bound quantizer): which side that quantizer stores, the other is exact.

    Every call must be one whole document. Per layer index: errors [candidates, H] and energy [H], sums over tokens and channels
    of the squared error and of the squared exact output; mass [Hq, FIRST], sums over queries of the probability of each of the
    first positions; queries, their number (those that could see all FIRST); uniform, the share they would have if every query
    attended alike to all it sees.
    """

    def __init__(self, layers: Sequence[LayerShape], candidates: Sequence[tuple[str, Quantizer]]) -> None:
        self._layers = {layer.index: (n, layer) for n, layer in enumerate(layers)}
        self._candidates = candidates
        self.errors = {la.index: torch.zeros(len(candidates), la.H, dtype=torch.float64) for la in layers}
        self.energy = {la.index: torch.zeros(la.H, dtype=torch.float64) for la in layers}
        self.mass = {la.index: torch.zeros(la.Hq, FIRST, dtype=torch.float64) for la in layers}
        self.queries = {la.index: 0 for la in layers}
        self._uniform = 0.0

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv]."""
        if len(k) < 2:  # a first token attends to itself only
            return
        n, shape = self._layers[layer]
        q, k, v = (x.float().cpu() for x in (q, k, v))  # where the candidates were bound
        weights = probabilities(shape, q, k)
        exact = mix(weights, v)
        self.energy[layer] += exact.square().sum((1, 2, 3)).double().cpu()
        if len(k) > FIRST:
            self.mass[layer] += weights[:, :, FIRST:, :FIRST].sum(2).flatten(0, 1).double().cpu()
            self.queries[layer] += len(k) - FIRST
            self._uniform += float((1 / torch.arange(FIRST + 1, len(k) + 1)).sum())
        for i, (sides, quantizer) in enumerate(self._candidates):
            w = probabilities(shape, q, _stored(quantizer, n, "k", k)) if "k" in sides else weights
            out = mix(w, _stored(quantizer, n, "v", v) if "v" in sides else v)
            self.errors[layer][i] += (out - exact).square().sum((1, 2, 3)).double().cpu()

    @property
    def uniform(self) -> float:
        return self._uniform / max(1, sum(self.queries.values()))

    def relative(self, layer: int) -> torch.Tensor:
        """float64 [candidates, H]: error over output, both as root mean squares."""
        return (self.errors[layer] / self.energy[layer].clamp(min=1e-30)).sqrt()


def probabilities(layer: LayerShape, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Causal softmax of one document: q [T, Hq, D], k [T, H, D] -> [H, G, T, T]. Learned sink logits are left out."""
    T, H = k.shape[:2]
    scores = torch.einsum("thgd,shd->hgts", q.unflatten(1, (H, -1)), k) * layer.scaling
    if layer.softcap is not None:
        scores = (scores / layer.softcap).tanh() * layer.softcap
    at = torch.arange(T, device=q.device)
    distance = at[:, None] - at
    hidden = (distance < 0) | (distance >= (layer.window or T))
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1)


def mix(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """weights [H, G, T, S], v [S, H, D] -> [H, G, T, D]."""
    return torch.einsum("hgts,shd->hgtd", weights, v)


def _stored(quantizer: Quantizer, layer: int, side: Side, x: torch.Tensor) -> torch.Tensor:
    """What attention reads of a whole document: the first tokens raw where the quantizer keeps them so."""
    out = roundtrip(quantizer, layer, side, x)
    raw = quantizer.raw_sink_tokens()
    out[:raw] = x[:raw]
    return out


def roundtrip(quantizer: Quantizer, layer: int, side: Side, x: torch.Tensor) -> torch.Tensor:
    """What is read back of K or V rows x [T, H, D]; layer: index into the bound layers."""
    out = []
    for i, ranges in enumerate(quantizer.formats(layer)):
        rows = x[:, ranges.heads.start : ranges.heads.stop]
        out.append(quantizer.decode(quantizer.encode(rows, side, layer, i), side, layer, torch.float32, i))
    return torch.cat(out, 1)
