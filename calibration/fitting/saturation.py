"""How well the static ranges of a quantizer hold the keys and values that come: an observer.

Takes: a bound quantizer, K and V of real tokens. Gives: per layer, the share of elements beyond the range and how far they reach.
Does not know about: where ranges came from, what share is too much.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qkv.layout import SIDES, STATIC_SCALES, KVFormat, LayerShape
from qkv.policies.quantizer.base import Quantizer
from qkv_kernels.reference import codec


@dataclass
class Fit:
    """K or V of one layer. elements: counted; outside: of them beyond the range; reach: of the furthest value of any channel,
    1.0 being the end of the range, measured from its middle."""

    elements: int = 0
    outside: int = 0
    reach: float = 0.0

    @property
    def rate(self) -> float:
        return self.outside / self.elements if self.elements else 0.0


def static_range(fmt: KVFormat, scale: torch.Tensor, zero: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest value that codes reach, in the shape of the scale."""
    low, high = (torch.full_like(scale, code) for code in codec.code_range(fmt))
    if zero is not None and fmt.zero == "code":
        low, high = low - zero, high - zero
    low, high = low * scale, high * scale
    return (low + zero, high + zero) if zero is not None and fmt.zero == "float" else (low, high)


class Saturation:
    """fits: {layer index: {"k", "v": Fit}}; a side without static scales has no entry: its range follows every token.

    Every call is a whole document: its first tokens do not count where the quantizer keeps them raw.
    """

    def __init__(self, layers: Sequence[LayerShape], quantizer: Quantizer) -> None:
        self._index = {layer.index: n for n, layer in enumerate(layers)}
        self._quantizer, self._raw = quantizer, quantizer.raw_sink_tokens()
        self.fits: dict[int, dict[str, Fit]] = {layer.index: {} for layer in layers}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """q unused, k [T, H, Dk], v [T, H, Dv]."""
        n = self._index[layer]
        for ranges, s in zip(self._quantizer.formats(n), self._quantizer.statics(n), strict=True):
            heads = slice(ranges.heads.start, ranges.heads.stop)
            for side, x in zip(SIDES, (k, v), strict=True):
                fmt, (scale, zero, _) = ranges.of(side), s.of(side)
                if fmt.scale in STATIC_SCALES and scale is not None:
                    _add(self.fits[layer].setdefault(side, Fit()), x[self._raw :, heads].float().cpu(), fmt, scale, zero)


def _add(fit: Fit, x: torch.Tensor, fmt: KVFormat, scale: torch.Tensor, zero: torch.Tensor | None) -> None:
    low, high = static_range(fmt, scale, zero)
    if scale.dim() == 1:  # per head
        low, high, scale = low[:, None], high[:, None], scale[:, None]
    slack = 0 if fmt.storage.is_floating_point else scale / 2  # half a step beyond the last code still rounds to it
    fit.elements += x.numel()
    fit.outside += int(((x < low - slack) | (x > high + slack)).sum())
    middle, half = (low + high) / 2, (high - low) / 2
    if len(x):
        fit.reach = max(fit.reach, float(((x - middle).abs() / half).max()))
