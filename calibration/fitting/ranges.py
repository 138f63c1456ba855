"""From statistics to the range that each channel's codes shall span, and from ranges to the statistics a quantizer reads.

Takes: Stats of one layer. Gives: Ranges. Does not know about: quantizers, documents, how a method judges a range.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from calibration.fitting import histogram
from calibration.fitting.collect import Stats
from qkv.errors import ConfigError


class Range(NamedTuple):
    """low, high [H, D] float32: what falls outside saturates."""

    low: torch.Tensor
    high: torch.Tensor


def seen(stats: Stats, side: str, raw: int = 0) -> Range:
    """All that was seen of K ("k") or V ("v"), but for the first `raw` tokens of a document: nothing else saturates."""
    if raw and f"{side}_body_min" in stats:
        return cover_sinks(Range(stats[f"{side}_body_min"], stats[f"{side}_body_max"]), stats, side, raw)
    return Range(stats[f"{side}_channel_min"], stats[f"{side}_channel_max"])


def percentile(stats: Stats, side: str, keep: float, raw: int = 0) -> Range:
    """The middle `keep` percent of every channel's values, half of the rest cut on each side; sink tokens are not clipped."""
    full = seen(stats, side, raw)
    counts = stats.get(f"{side}_histogram")
    if counts is None:  # every document had sink tokens only
        return full
    outside = (1 - keep / 100) / 2
    low = torch.maximum(histogram.quantile(counts, outside), full.low)  # a quantile is read off a bin, an extreme is exact
    high = torch.minimum(histogram.quantile(counts, 1 - outside), full.high)
    return cover_sinks(Range(low, high), stats, side, raw)


def narrowed(full: Range, factor: float, symmetric: bool) -> Range:
    """`factor` times the width: towards zero for symmetric codes, towards the middle where there is a zero point."""
    middle = torch.zeros_like(full.low) if symmetric else (full.low + full.high) / 2
    return Range(middle + (full.low - middle) * factor, middle + (full.high - middle) * factor)


def cover_sinks(r: Range, stats: Stats, side: str, raw: int = 0) -> Range:
    """Widened to what the sink tokens need, but for the first `raw`, which the quantizer does not encode. These are few, so an
    average would sacrifice them, but all tokens attend to them."""
    low, high = stats.get(f"{side}_sink_min"), stats.get(f"{side}_sink_max")
    if low is None or high is None or raw >= len(low):
        return r
    return Range(torch.minimum(r.low, low[raw:].amin(0)), torch.maximum(r.high, high[raw:].amax(0)))


RANGE_KINDS = ("channel_min", "channel_max", "channel_absmax", "head_absmax")  # statistics that a range determines


def as_statistics(names: Iterable[str], k: Range, v: Range, collected: Stats) -> Stats:
    """The statistics called `names`, as if exactly these ranges had been seen; as collected where a range says nothing of them.

    Raises ConfigError for one that was not collected.
    """
    out: Stats = {}
    for name in names:
        r = k if name.startswith("k_") else v
        if name[2:] not in RANGE_KINDS:
            if name not in collected:
                raise ConfigError(f"calibration collected no {name}; it has: {', '.join(sorted(collected))}")
            out[name] = collected[name]
            continue
        absmax = torch.maximum(r.low.abs(), r.high.abs())
        kinds = {"channel_min": r.low, "channel_max": r.high, "channel_absmax": absmax, "head_absmax": absmax.amax(-1)}
        out[name] = kinds[name[2:]]
    return out


def is_symmetric(names: Iterable[str]) -> bool:
    """Whether a quantizer that observes these has codes symmetric about zero."""
    return all(name.endswith("absmax") for name in names)
