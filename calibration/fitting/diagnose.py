"""What a calibration found, in numbers per layer and head, and what they suggest: outliers, protection, sink tokens, saturation.

Takes: Statistics, a quantizer with its scales, a few documents through the model. Gives: one dictionary of JSON values.
Does not know about: files, plots, perplexity. Every rule is a constant below and is stated with its result.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from calibration.fitting import histogram
from calibration.fitting.collect import Collector, Stats, run_document
from calibration.fitting.output import FIRST, OutputErrors
from calibration.fitting.saturation import Saturation
from calibration.fitting.search import bound, tensors
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer

if TYPE_CHECKING:
    from qkv.engine import Engine

OUTLIER = 10.0  # a K channel is an outlier from this multiple of its head's median channel on
LAYER = 2.0  # a layer is worth protecting from this multiple of the median layer's output error on
HEAD = 4.0  # a head, of the median head's
SINK = 0.05  # a position holds a sink token from this mean share of the attention on, and from SINK_RATIO times an even share on
SINK_RATIO = 3.0
BEYOND = 0.05  # a channel grew from this share of its calibrated range on
_WORST = 4  # times per-channel's output error, from which on per-token keys are advised against
_NOTHING = 1e-4  # relative errors below this are no basis for a ratio

Layers = list[dict[str, Any]]


def diagnose(
    engine: "Engine",
    stats: Mapping[int, Stats],
    quantizer: Quantizer,
    scales: dict[str, torch.Tensor],
    documents: Sequence[Sequence[int]],
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """engine stores K and V unquantized and runs each of `documents` in one step. progress(tokens) after each.

    "layers": per layer {layer, k_absmax [H], v_absmax [H], v_token {p50, p99} [H], outliers [{head, channel, absmax, ratio}], and
    measured on `documents`: saturation and reach {k, v}, beyond {k, v} (share of channels that leave what the statistics saw by
    at least BEYOND of its width), output_error [H] (relative, both sides stored), output_error_k [H],
    output_error_int8_channel_k and output_error_int8_token_k [H] (keys as in int8 and int8_token instead), sink_share [FIRST]
    and even_share (if all positions drew alike)}. "suggestions": see suggest().
    """
    fixed = bound(quantizer, scales, engine.layers)
    saturation, errors = Saturation(engine.layers, fixed), _output_errors(engine, fixed, stats)
    seen = Collector([f"{side}_channel_{end}" for side in "kv" for end in ("min", "max")])

    def ranges(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        saturation(layer, q, k, v)
        seen(layer, q, k, v)

    for tokens in documents:
        for observer in (ranges, errors):
            if observer is not None and len(tokens) > 1:
                with engine.observe(observer):
                    run_document(engine, tokens)
        if progress:
            progress(len(tokens))
    layers = []
    for layer in engine.layers:
        entry = _ranges(layer.index, stats[layer.index])
        entry["saturation"] = {side: fit.rate for side, fit in saturation.fits[layer.index].items()}
        entry["reach"] = {side: fit.reach for side, fit in saturation.fits[layer.index].items()}
        if layer.index in seen.stats:
            entry["beyond"] = {side: _beyond(stats[layer.index], seen.stats[layer.index], side) for side in "kv"}
        if errors is not None and documents:
            names = ("output_error", "output_error_k", "output_error_int8_channel_k", "output_error_int8_token_k")
            entry |= dict(zip(names, errors.relative(layer.index).tolist(), strict=True))
            mass = errors.mass[layer.index].mean(0) / max(1, errors.queries[layer.index])
            entry |= {"sink_share": mass.tolist(), "even_share": errors.uniform}
        layers.append(entry)
    return {"layers": layers, "suggestions": suggest(layers)}


def _beyond(calibrated: Stats, seen: Stats, side: str) -> float:
    """Share of the channels of a layer whose values in `seen` leave the calibrated range by at least BEYOND of its width."""
    low, high = calibrated[f"{side}_channel_min"], calibrated[f"{side}_channel_max"]
    over = torch.maximum(low - seen[f"{side}_channel_min"], seen[f"{side}_channel_max"] - high)
    return float((over > BEYOND * (high - low)).float().mean())


def _output_errors(engine: "Engine", quantizer: Quantizer, stats: Mapping[int, Stats]) -> OutputErrors | None:
    """None for a quantizer whose blocks are encoded together: it has no error per token."""
    formats = [f for i in range(len(engine.layers)) for r in quantizer.formats(i) for f in (r.k, r.v)]
    if any(f.unit != "token" for f in formats):
        return None
    int8, per_token = QUANTIZERS.build("int8"), QUANTIZERS.build("int8_token")
    per_channel = bound(int8, tensors(int8, stats, engine.layers, "absmax", 100.0), engine.layers)
    per_token.bind(list(engine.layers), None, torch.float32, torch.device("cpu"))
    return OutputErrors(engine.layers, [("kv", quantizer), ("k", quantizer), ("k", per_channel), ("k", per_token)])


def _ranges(index: int, stats: Stats) -> dict[str, Any]:
    """What the statistics alone say about one layer."""
    k, v = (torch.maximum(stats[f"{s}_channel_min"].abs(), stats[f"{s}_channel_max"].abs()) for s in "kv")
    ratio = k / k.median(-1, keepdim=True).values.clamp(min=1e-30)
    outliers = [
        {"head": h, "channel": c, "absmax": float(k[h, c]), "ratio": float(ratio[h, c])}
        for h, c in sorted((ratio >= OUTLIER).nonzero().tolist(), key=lambda hc: -float(ratio[hc[0], hc[1]]))
    ]
    tokens = {f"p{p:g}": histogram.quantile(stats["v_token_histogram"], p / 100).tolist() for p in (50, 99)}
    return {
        "layer": index,
        "k_absmax": k.amax(-1).tolist(),
        "v_absmax": v.amax(-1).tolist(),
        "k_channel_ratio_max": ratio.amax(-1).tolist(),
        "v_token": tokens,
        "outliers": outliers,
    }


@dataclasses.dataclass
class Suggestions:
    """layers, heads [[layer, head]], sinks (how many sink tokens at the start): worth a wider format. lines: why, for people."""

    layers: list[int] = dataclasses.field(default_factory=list)
    heads: list[list[int]] = dataclasses.field(default_factory=list)
    sinks: int = 0
    lines: list[str] = dataclasses.field(default_factory=list)


def suggest(layers: Layers) -> dict[str, Any]:
    """What to protect, and which kinds of scale suit the keys."""
    out = Suggestions()
    found = [(entry["layer"], o) for entry in layers for o in entry["outliers"]]
    if found:
        index, top = max(found, key=lambda pair: float(pair[1]["ratio"]))
        out.lines.append(
            f"{len(found)} outlier key channels (at least {OUTLIER:g} times the median channel of their head), the largest in "
            f"layer {index}, head {top['head']}, channel {top['channel']}: {top['ratio']:.0f} times. One scale per channel holds "
            "them; one scale per token would spend its range on them."
        )
    measured = [entry for entry in layers if "output_error" in entry]
    if measured:
        _from_errors(measured, out)
    saturated = [(e["layer"], side, rate) for e in layers for side, rate in e["saturation"].items() if rate > 1e-3]
    if saturated:
        index, side, rate = max(saturated, key=lambda s: float(s[2]))
        out.lines.append(
            f"{len(saturated)} layers saturate in more than 0.1 % of {'keys' if side == 'k' else 'values'} elements, most in "
            f"layer {index}: {100 * rate:.2f} %."
        )
    return dataclasses.asdict(out)


def _from_errors(layers: Layers, out: Suggestions) -> None:
    heads = torch.tensor([entry["output_error"] for entry in layers])
    per_layer = heads.square().mean(-1).sqrt()
    typical = float(per_layer.median())
    out.layers = [e["layer"] for e, error in zip(layers, per_layer.tolist(), strict=True) if error >= LAYER * typical > 0]
    limit = HEAD * float(heads.median())
    out.heads = [[layers[i]["layer"], h] for i, h in (heads >= limit).nonzero().tolist() if layers[i]["layer"] not in out.layers]
    if out.layers:
        out.lines.append(
            f"protect layers {', '.join(map(str, out.layers))}: their attention output moves at least {LAYER:g} times as much as "
            f"the median layer's ({100 * typical:.2f} %)."
        )
    if out.heads:
        named = ", ".join(f"{layer}/{head}" for layer, head in out.heads)
        out.lines.append(f"protect heads (layer/head) {named}: at least {HEAD:g} times the median head's error.")
    share = torch.tensor([e["sink_share"] for e in layers]).mean(0)
    sinks = (share >= max(SINK, SINK_RATIO * layers[0]["even_share"])).nonzero()
    out.sinks = int(sinks.amax()) + 1 if len(sinks) else 0
    if out.sinks:
        out.lines.append(
            f"keep the first {out.sinks} token(s) in a wider format: of the first {FIRST} positions they draw at least "
            f"{100 * SINK:g} % of the attention each (the first: {100 * float(share[0]):.0f} %)."
        )
    channel, token = (torch.tensor([e[f"output_error_int8_{kind}_k"] for e in layers]) for kind in ("channel", "token"))
    worst = (token / channel.clamp(min=_NOTHING)).flatten()
    at = int(worst.argmax())
    where = f"layer {layers[at // channel.shape[1]]['layer']}, head {at % channel.shape[1]}"
    verdict = "do not use per-token keys here" if float(worst[at]) >= _WORST else "no head is much worse off with them"
    out.lines.append(
        f"8-bit keys with one scale per token would move attention output {100 * float(token.square().mean().sqrt()):.2f} %, "
        f"with one per channel {100 * float(channel.square().mean().sqrt()):.2f} %; at worst {where}, "
        f"{float(worst[at]):.1f} times as much: {verdict}."
    )
