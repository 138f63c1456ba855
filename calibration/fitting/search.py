"""Which range each static scale should span: four methods, from "all that was seen" to "what attention output likes best".

    absmax      all that was seen: nothing of the calibration data saturates
    percentile  the middle part of each channel's values
    mse         of a ladder of narrower ranges, the one with the smallest squared error of the stored values
    output      of the same ladder, the one with the smallest squared error of attention's output, measured on documents

With `percentile` and `mse` the first tokens of every document (its sink tokens) are kept out of the statistics and ranges are
widened to hold them: squared error alone would wreck them, since they are few. `output` needs no such rule, it sees what a
clipped sink does to everybody else. Sink tokens that the quantizer keeps raw (protected) count for no method.
Sources: clipping by squared error as in OCTAV (Sakr et al. 2022) and SKVQ (Duanmu et al.
2024), by the output of the operation as in AWQ (Lin et al. 2024); theirs are about weights or groups, ours about static
scales of a KV cache, and the error is measured with the quantizer's own encode and decode, whatever its format.

Takes: Statistics, a quantizer, for `output` an engine and documents. Gives: tensors of a ScaleFile.
Does not know about: files, where documents come from.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from calibration.fitting import histogram
from calibration.fitting.collect import Stats, run_document
from calibration.fitting.output import OutputErrors, roundtrip
from calibration.fitting.ranges import Range, as_statistics, cover_sinks, is_symmetric, narrowed, percentile, seen
from qkv.errors import ConfigError
from qkv.layout import SIDES, LayerShape, Side
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile

if TYPE_CHECKING:
    from qkv.engine import Engine

Method = Literal["absmax", "percentile", "mse", "output"]
LADDER = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4)  # shares of the full range; the first wins ties
Choices = dict[int, dict[str, torch.Tensor]]  # layer -> {"k", "v"} -> index into LADDER, [H, D] or [H, 1]


def tensors(
    quantizer: Quantizer, stats: Mapping[int, Stats], layers: Sequence[LayerShape], method: Method, keep: float
) -> dict[str, torch.Tensor]:
    """Tensors of a ScaleFile by absmax, percentile (`keep` percent) or mse: these need statistics only."""
    names = quantizer.observers()
    if method == "mse":
        return at(quantizer, stats, least_squares(quantizer, stats, layers), cover=True)
    raw = quantizer.raw_sink_tokens()

    def pick(s: Stats, side: str) -> Range:
        return seen(s, side, raw) if method == "absmax" else percentile(s, side, keep, raw)

    return quantizer.tensors_from_stats({i: as_statistics(names, pick(s, "k"), pick(s, "v"), s) for i, s in stats.items()})


def at(quantizer: Quantizer, stats: Mapping[int, Stats], choices: Choices, cover: bool) -> dict[str, torch.Tensor]:
    """Tensors with each channel's or head's own step of the ladder."""
    names = quantizer.observers()
    symmetric, ladder, raw = is_symmetric(names), torch.tensor(LADDER), quantizer.raw_sink_tokens()
    out = {}
    for i, s in stats.items():
        chosen = {side: _narrow(s, side, ladder[choices[i][side]], symmetric, cover, raw) for side in "kv"}
        out[i] = as_statistics(names, chosen["k"], chosen["v"], s)
    return quantizer.tensors_from_stats(out)


def _narrow(stats: Stats, side: str, factor: Any, symmetric: bool, cover: bool, raw: int) -> Range:
    r = narrowed(seen(stats, side, raw), factor, symmetric)
    return cover_sinks(r, stats, side, raw) if cover else r


def candidates(quantizer: Quantizer, stats: Mapping[int, Stats], layers: Sequence[LayerShape], cover: bool) -> list[Quantizer]:
    """The quantizer, bound, at every step of the ladder."""
    everywhere = {i: {side: torch.tensor(0) for side in "kv"} for i in stats}
    out = []
    for step in range(len(LADDER)):
        uniform = {i: {side: index + step for side, index in sides.items()} for i, sides in everywhere.items()}
        out.append(bound(quantizer, at(quantizer, stats, uniform, cover), layers))
    return out


def bound(quantizer: Quantizer, scales: dict[str, torch.Tensor], layers: Sequence[LayerShape]) -> Quantizer:
    """A new quantizer with the same settings and these scales."""
    settings = {f.name: getattr(quantizer, f.name) for f in dataclasses.fields(quantizer) if f.init}
    other = QUANTIZERS.build({"name": quantizer.name, **settings})
    other.bind(list(layers), ScaleFile(scales, {"quantizer": quantizer.name}), torch.float32, torch.device("cpu"))
    return other


def searched_sides(quantizer: Quantizer) -> list[Side]:
    """Of K and V, those with static scales."""
    return [side for side in SIDES if any(name.startswith(f"{side}_") for name in quantizer.observers())]


def least_squares(quantizer: Quantizer, stats: Mapping[int, Stats], layers: Sequence[LayerShape]) -> Choices:
    """Per channel (per head where scales are per head) the step with the smallest squared error, from the histograms."""
    steps, sides = candidates(quantizer, stats, layers, cover=True), searched_sides(quantizer)
    choices: Choices = {}
    for n, layer in enumerate(layers):
        choices[layer.index] = {side: torch.zeros(layer.H, 1, dtype=torch.int64) for side in "kv"}
        for side in sides:
            counts = stats[layer.index].get(f"{side}_histogram")
            if counts is None:  # every document had sink tokens only
                continue
            x, weights = histogram.points(counts)
            rows = x[:, None, None].expand(weights.shape)
            errors = torch.stack([((roundtrip(q, n, side, rows) - rows).square() * weights).sum(0) for q in steps])
            if not any(name.startswith(f"{side}_channel") for name in quantizer.observers()):
                errors = errors.sum(-1, keepdim=True)
            choices[layer.index][side] = errors.argmin(0)
    return choices


def least_output_error(
    quantizer: Quantizer,
    stats: Mapping[int, Stats],
    engine: "Engine",
    documents: Sequence[Sequence[int]],
    progress: Callable[[int], None] | None = None,
) -> Choices:
    """Per head the step with the smallest squared error of attention's output, over `documents`. progress(tokens) after each.

    K is judged with exact V, and V with exact K. Raises ConfigError for formats that are not encoded token by token.
    """
    steps, sides = candidates(quantizer, stats, engine.layers, cover=False), searched_sides(quantizer)
    if any(f.unit != "token" for i in range(len(engine.layers)) for r in steps[0].formats(i) for f in (r.k, r.v)):
        raise ConfigError(
            f"method=output needs a quantizer that encodes single tokens, {quantizer.name} does not; use method=mse"
        )
    observer = OutputErrors(engine.layers, [(side, q) for side in sides for q in steps])
    with engine.observe(observer):
        for tokens in documents:
            run_document(engine, tokens)
            if progress:
                progress(len(tokens))
    choices: Choices = {}
    for layer in engine.layers:
        choices[layer.index] = {side: torch.zeros(layer.H, 1, dtype=torch.int64) for side in "kv"}
        for side, errors in zip(sides, observer.errors[layer.index].split(len(steps)), strict=True):
            choices[layer.index][side] = errors.argmin(0)[:, None]
    return choices
