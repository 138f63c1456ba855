"""Static scales for a quantizer, from statistics of real keys and values.

Takes: an engine that stores K and V unquantized, token lists, a quantizer. Gives: a ScaleFile.
Does not know about: where text comes from (data.py), how statistics become scales (the quantizer does), files.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
import xxhash

from qkv.errors import ConfigError, ScaleError
from qkv.policies.quantizer.base import Quantizer
from qkv.scales import ScaleFile
from qkv.types import SamplingParams

if TYPE_CHECKING:
    from qkv.engine import Engine

Stats = dict[str, torch.Tensor]
Reduce = Callable[[torch.Tensor], torch.Tensor]

_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)

# name -> (which of k, v; over the tokens of one call [T, H, D] -> the statistic; how calls combine)
_STATISTICS: dict[str, tuple[str, Reduce, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "k_channel_absmax": ("k", lambda x: x.abs().amax(0), torch.maximum),  # [H, Dk]
    "k_channel_max": ("k", lambda x: x.amax(0), torch.maximum),  # [H, Dk]
    "k_channel_min": ("k", lambda x: x.amin(0), torch.minimum),  # [H, Dk]
    "k_head_absmax": ("k", lambda x: x.abs().amax((0, 2)), torch.maximum),  # [H]
    "v_head_absmax": ("v", lambda x: x.abs().amax((0, 2)), torch.maximum),  # [H]
}


class Collector:
    """An observer that keeps running extremes of every layer, float32, whatever the batch."""

    def __init__(self, names: Sequence[str]) -> None:
        unknown = sorted(set(names) - set(_STATISTICS))
        if unknown:
            raise ConfigError(f"calibration cannot collect {', '.join(unknown)}; it collects: {', '.join(sorted(_STATISTICS))}")
        self.names = sorted(names)
        self.stats: dict[int, Stats] = {}

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k [T, H, Dk], v [T, H, Dv] of real tokens."""
        if not len(k):
            return
        seen = self.stats.setdefault(layer, {})
        for name in self.names:
            which, reduce, combine = _STATISTICS[name]
            new = reduce((k if which == "k" else v).detach().float())
            seen[name] = combine(seen[name], new) if name in seen else new


def calibrate(
    engine: "Engine",
    token_lists: Sequence[Sequence[int]],
    quantizer: Quantizer,
    progress: Callable[[int, int], None] | None = None,
) -> ScaleFile:
    """Scales of `quantizer` from `token_lists`, run through `engine` (whose own quantizer should be `none`).

    progress(done, total) is called after every document. Raises ScaleError when there is nothing to learn from, when a
    layer was not reached, or when the model produced values that are not finite.
    """
    documents = [list(tokens) for tokens in token_lists if tokens]
    total = sum(map(len, documents))
    if not total:
        raise ScaleError("calibration got no tokens; give documents with text")
    collector = Collector(sorted(quantizer.observers()))
    with engine.observe(collector):
        for i, tokens in enumerate(documents):
            # One new token each: scoring would compute logits that nobody reads.
            engine.generate([tokens], _ONE_TOKEN)
            if progress:
                progress(i + 1, len(documents))
    for layer in engine.layers:
        stats = collector.stats.get(layer.index)
        if stats is None:
            raise ScaleError(f"calibration: layer {layer.index} was never reached")
        bad = [name for name, value in stats.items() if not bool(value.isfinite().all())]
        if bad:
            raise ScaleError(
                f"calibration: layer {layer.index}: {', '.join(bad)} is not finite; the model overflows in its dtype"
            )
    settings = {f.name: getattr(quantizer, f.name) for f in dataclasses.fields(quantizer) if f.init}
    metadata = {
        "model": engine.loaded.name,
        "model_fingerprint": engine.loaded.fingerprint,
        "quantizer": quantizer.name,
        "quantizer_fields": settings,
        "method": "absmax",
        "data_fingerprint": xxhash.xxh3_128_hexdigest(json.dumps(documents).encode()),
        "documents": len(documents),
        "tokens": total,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return ScaleFile(quantizer.tensors_from_stats(collector.stats), metadata)
