"""Histograms over magnitude: the sketch from which quantiles and expected errors are read. Two of them add up exactly.

Takes: values. Gives: counts per channel, quantiles, representative points. Does not know about: keys, values, models.

Bins: 256 magnitudes for each sign. A bin is what a float32's exponent and its first 3 mantissa bits say, so 8 bins per power
of two, each 1/8 to 1/15 of its value wide, from 2^-14 (6e-5) to 2^18; smaller values count in the first, larger in the last.
A quantile interpolates within its bin. Counts are integers: merging shards gives, to the bit, what one run over all gives.
"""

import torch

MAGNITUDES = 256
BINS = 2 * MAGNITUDES
_SUBBINS = 3  # bits
_FIRST = (127 - 14) << _SUBBINS  # exponent and leading mantissa bits of the lowest bin


def count(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...] finite or not -> int32 [..., BINS]: negative values from large to small, then positive from small to large.

    Values that are not finite count in the outermost bin of their sign.
    """
    channels = x[0].numel()
    bits = x.detach().float().contiguous().view(torch.int32).reshape(len(x), channels)
    magnitude = ((bits & 0x7FFFFFFF) >> (23 - _SUBBINS)).sub_(_FIRST).clamp_(0, MAGNITUDES - 1)
    index = torch.where(bits < 0, MAGNITUDES - 1 - magnitude, MAGNITUDES + magnitude)
    index += torch.arange(channels, device=x.device, dtype=index.dtype) * BINS
    counts = torch.bincount(index.flatten(), minlength=channels * BINS)
    return counts.view(*x.shape[1:], BINS).int().cpu()


def edges() -> torch.Tensor:
    """float64 [BINS + 1], rising. The innermost bins meet at 0, so zeros lie on an edge."""
    codes = torch.arange(MAGNITUDES + 1, dtype=torch.int32).add(_FIRST) << (23 - _SUBBINS)
    positive = codes.view(torch.float32).double()
    positive[0] = 0.0
    return torch.cat([-positive.flip(0)[:-1], positive])


def quantile(counts: torch.Tensor, share: float) -> torch.Tensor:
    """The value below which `share` (0 to 1) of the counted ones lie: counts [..., BINS] -> float32 [...]; 0 if none were."""
    rising = counts.double().cumsum(-1)
    wanted = share * rising[..., -1:]
    at = torch.searchsorted(rising, wanted).clamp(max=BINS - 1)
    inside = counts.double().gather(-1, at)
    below = rising.gather(-1, at) - inside
    fraction = ((wanted - below) / inside.clamp(min=1)).clamp(0, 1)[..., 0]
    borders = edges()
    value = borders[at[..., 0]] * (1 - fraction) + borders[at[..., 0] + 1] * fraction
    return torch.where(rising[..., -1] > 0, value, 0.0).float()


def points(counts: torch.Tensor, per_bin: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that stand for the counted ones: x float32 [n], weights float32 [n, ...] for counts [..., BINS].

    `per_bin` evenly spaced points of every bin that holds anything; each carries its share of the bin's count.
    """
    used = counts.reshape(-1, BINS).sum(0).nonzero()[:, 0]
    borders = edges()
    steps = (torch.arange(per_bin, dtype=torch.float64) + 0.5) / per_bin
    x = borders[used][:, None] * (1 - steps) + borders[used + 1][:, None] * steps
    weights = counts[..., used].movedim(-1, 0).float().repeat_interleave(per_bin, 0) / per_bin
    return x.flatten().float(), weights
