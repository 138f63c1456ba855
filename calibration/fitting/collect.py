"""Statistics of real keys and values, gathered inside our attention function; and static scales from them, in memory.

Takes: an engine that stores K and V unquantized, token lists. Gives: Statistics, or a ScaleFile.
Does not know about: where text comes from (data.py), how ranges are chosen (ranges.py, search.py), how statistics become
scales (the quantizer does).
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from calibration.fitting import histogram
from calibration.text.enough import shortage
from qkv.errors import ConfigError, ScaleError
from qkv.layout import LayerShape
from qkv.models import LoadedModel, fingerprint
from qkv.policies.quantizer.base import Quantizer
from qkv.scales import ScaleFile
from qkv.types import SamplingParams

if TYPE_CHECKING:
    from qkv.engine import Engine

Stats = dict[str, torch.Tensor]
Reduce = Callable[[torch.Tensor, int, int], torch.Tensor | None]
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)

_LARGEST = torch.finfo(torch.float32).max  # of a position that no document reached: finite, and neutral


def _of_body(x: torch.Tensor, start: int, sinks: int, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    body = x[max(0, sinks - start) :]
    return reduce(body) if len(body) else None


def _of_sinks(x: torch.Tensor, start: int, sinks: int, neutral: float) -> torch.Tensor | None:
    if start >= sinks:
        return None
    out = x.new_full((sinks, *x.shape[1:]), neutral)
    rows = x[: sinks - start]
    out[start : start + len(rows)] = rows
    return out


# Name without "k_" or "v_" -> (reduce, combine). reduce takes the tokens of one call, x [T, H, D], the position of its first row
# in the document and how many positions count as sink tokens; it gives the statistic, or None if no row concerns it. combine
# joins what calls, documents and shards gave, exactly, in any order. The body is all but the sink tokens.
_KINDS: dict[str, tuple[Reduce, Combine]] = {
    "channel_absmax": (lambda x, *_: x.abs().amax(0), torch.maximum),  # [H, D]
    "channel_max": (lambda x, *_: x.amax(0), torch.maximum),  # [H, D]
    "channel_min": (lambda x, *_: x.amin(0), torch.minimum),  # [H, D]
    "head_absmax": (lambda x, *_: x.abs().amax((0, 2)), torch.maximum),  # [H]
    "body_max": (lambda x, at, n: _of_body(x, at, n, lambda x: x.amax(0)), torch.maximum),  # [H, D]
    "body_min": (lambda x, at, n: _of_body(x, at, n, lambda x: x.amin(0)), torch.minimum),  # [H, D]
    "sink_max": (lambda x, at, n: _of_sinks(x, at, n, -_LARGEST), torch.maximum),  # [sinks, H, D], by position
    "sink_min": (lambda x, at, n: _of_sinks(x, at, n, _LARGEST), torch.minimum),  # [sinks, H, D]
    "histogram": (lambda x, at, n: _of_body(x, at, n, histogram.count), torch.add),  # [H, D, BINS], of the body
    "token_histogram": (lambda x, *_: histogram.count(x.abs().amax(-1)), torch.add),  # [H, BINS], of each token's absmax
}
STATISTICS = {f"{side}_{name}": (side, *kind) for side in "kv" for name, kind in _KINDS.items()}
FULL = tuple(name for name in STATISTICS if not name.endswith("absmax"))  # what every method and the report need
HISTOGRAM_LIMIT = 2**31 - 1  # tokens that an int32 count holds


class Collector:
    """An observer that keeps running statistics of every layer, whatever the batch.

    sink_tokens: how many tokens at the start of a document count as sink tokens. skip: tokens at the start of a document
    that no statistic sees. With either, run documents one at a time and call begin() before each.
    """

    def __init__(self, names: Sequence[str], sink_tokens: int = 0, skip: int = 0) -> None:
        unknown = sorted(set(names) - set(STATISTICS))
        if unknown:
            raise ConfigError(f"calibration cannot collect {', '.join(unknown)}; it collects: {', '.join(sorted(STATISTICS))}")
        self.names, self.sink_tokens, self.skip = sorted(names), sink_tokens, skip
        self.stats: dict[int, Stats] = {}
        self._position: dict[int, int] = {}

    def begin(self) -> None:
        """The next rows are the start of a document."""
        self._position.clear()

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv] of real tokens."""
        start = self._position.get(layer, 0)
        self._position[layer] = start + len(k)
        drop = max(0, self.skip - start)
        if len(k) <= drop:
            return
        sides = {"k": k[drop:].detach().float(), "v": v[drop:].detach().float()}
        new = {}
        for name in self.names:
            side, reduce, _ = STATISTICS[name]
            value = reduce(sides[side], start + drop, self.sink_tokens)
            if value is not None:
                new[name] = value.cpu()
        self.stats[layer] = combined(self.stats.get(layer, {}), new)


def combined(a: Stats, b: Stats) -> Stats:
    """Statistics of the union of what `a` and `b` saw."""
    return a | {name: STATISTICS[name][2](a[name], value) if name in a else value for name, value in b.items()}


def run_document(engine: "Engine", tokens: Sequence[int]) -> None:
    """One forward over the document; scoring would compute logits that nobody reads, so it asks for one new token.

    Raises ScaleError for a document that the engine cannot take.
    """
    (output,) = engine.generate([list(tokens)], _ONE_TOKEN)
    if output.id < 0:  # refused; a model that overflows is found in the statistics, with the layer
        raise ScaleError(f"calibration: a document of {len(tokens)} tokens cannot be run: {output.error}")


def check_finite(stats: dict[int, Stats], layers: Sequence[LayerShape]) -> None:
    """Raises ScaleError when a layer was not reached, or when the model produced values that are not finite."""
    for layer in layers:
        if layer.index not in stats:
            raise ScaleError(f"calibration: layer {layer.index} was never reached")
        bad = [name for name, value in stats[layer.index].items() if not bool(value.isfinite().all())]
        if bad:
            raise ScaleError(
                f"calibration: layer {layer.index}: {', '.join(bad)} is not finite; the model overflows in its dtype"
            )


def data_fingerprint(documents: Sequence[Sequence[int]]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([list(tokens) for tokens in documents]).encode())


def identity(engine: "Engine", documents: Sequence[Sequence[int]], sink_tokens: int) -> dict[str, Any]:
    """What two runs must have in common for one to continue the other's statistics. Raises ScaleError if the engine's model was
    changed since."""
    if isinstance(engine.loaded, LoadedModel) and fingerprint(engine.loaded.model) != engine.loaded.fingerprint:
        raise ScaleError("the model was changed since this engine was made; create a new engine to calibrate it as it is now")
    return {
        "model": engine.loaded.name,
        "model_fingerprint": engine.loaded.fingerprint,
        "dtype": engine.config.model.dtype,
        "sink_tokens": sink_tokens,
        "data_fingerprint": data_fingerprint(documents),
    }


def provenance(engine: "Engine", documents: Sequence[Sequence[int]], sink_tokens: int) -> dict[str, Any]:
    """The part of a file's metadata that says which model and which data it came from. warnings: of too little text."""
    tokens = sum(map(len, documents))
    return identity(engine, documents, sink_tokens) | {
        "documents": len(documents),
        "tokens": tokens,
        "warnings": text_warnings(tokens),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def text_warnings(tokens: int) -> list[str]:
    """What a scale file from so many tokens must say."""
    short = shortage(tokens)
    return [] if short is None else [short]


def quantizer_metadata(quantizer: Quantizer, method: str) -> dict[str, Any]:
    """The part of a scale file's metadata that says which quantizer it is for."""
    settings = {f.name: getattr(quantizer, f.name) for f in dataclasses.fields(quantizer) if f.init}
    return {"quantizer": quantizer.name, "quantizer_fields": settings, "method": method}


def absmax_scales(
    engine: "Engine",
    token_lists: Sequence[Sequence[int]],
    quantizer: Quantizer,
    progress: Callable[[int, int], None] | None = None,
) -> ScaleFile:
    """Scales of `quantizer` by absmax, from `token_lists`, run through `engine` (whose own quantizer should be `none`).

    progress(done, total) is called after every document. Raises ScaleError when there is nothing to learn from, when a
    layer was not reached, or when the model produced values that are not finite.
    """
    documents = [list(tokens) for tokens in token_lists if tokens]
    if not documents:
        raise ScaleError("calibration got no tokens; give documents with text")
    collector = Collector(sorted(quantizer.observers()), skip=quantizer.raw_sink_tokens())
    with engine.observe(collector):
        for i, tokens in enumerate(documents):
            collector.begin()
            run_document(engine, tokens)
            if progress:
                progress(i + 1, len(documents))
    check_finite(collector.stats, engine.layers)
    metadata = provenance(engine, documents, quantizer.raw_sink_tokens()) | quantizer_metadata(quantizer, "absmax")
    return ScaleFile(quantizer.tensors_from_stats(collector.stats), metadata)
