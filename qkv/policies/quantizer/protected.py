"""Another quantizer, with what hurts most kept in a wider format: layers, heads, the first tokens, the most recent blocks."""

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from qkv.errors import ScaleError
from qkv.layout import Codes, HeadFormat, HeadStatics, KVFormat, LayerShape, Side
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile, StaticTensor
from qkv.validate import require


class _Range(NamedTuple):
    """One head range of a layer: the quantizer that stores it, and which heads (`within`) of which of its own ranges it is."""

    owner: Quantizer
    range_index: int
    source: HeadFormat  # the owner's own range
    within: slice
    format: HeadFormat


@QUANTIZERS.register("protected")
@dataclass
class ProtectedQuantizer(Quantizer):
    """Stores what `inner` stores, except: whole `layers` and single `heads` in the formats of `wide`, the first `sink_tokens`
    raw as well, and the open block and the `tail_blocks` before it raw until they are older.

    inner: any quantizer; its bits, plus the share of what is protected. wide: one that needs no scales.
    layers: attention layers by position, negative ones from the end. heads: [layer, kv head] pairs.
    sink_tokens: read raw by every query, at most a block of them. A sequence's are kept once, with its first block.
    tail_blocks: null leaves inner's rule; 0 keeps the open block raw, n the n before it too (prefix caching is off then).
    Source: sinks as in KVQuant (Hooper et al. 2024) and SKVQ (Duanmu et al. 2024), the recent window as in KIVI (Liu et al.
    2024), layers as in KVTuner (Li et al. 2025). Ours is one wrapper around any quantizer, and tails and sinks are allocated
    bytes that every memory figure counts.
    """

    inner: Any = "int4"
    wide: Any = "none"
    layers: list[int] = field(default_factory=list)
    heads: list[list[int]] = field(default_factory=list)
    sink_tokens: int = 4
    tail_blocks: int | None = None

    encode_rule: ClassVar[Literal["minmax", "custom"]] = "minmax"

    def __post_init__(self) -> None:
        require(0 <= self.sink_tokens <= 256, "sink_tokens", self.sink_tokens, "0 to 256")
        require(self.tail_blocks is None or 0 <= self.tail_blocks <= 64, "tail_blocks", self.tail_blocks, "null or 0 to 64")
        require(all(len(pair) == 2 for pair in self.heads), "heads", self.heads, "[layer, head] pairs")
        self._inner, self._wide = QUANTIZERS.build(self.inner), QUANTIZERS.build(self.wide)
        require(not self._wide.needs_scales, "wide", self._wide.name, "a quantizer that needs no scales, like none or int8_token")
        if "custom" in (self._inner.encode_rule, self._wide.encode_rule):
            self.encode_rule = "custom"  # type: ignore[misc]

    def bind(self, layers: list[LayerShape], scales: ScaleFile | None, dtype: torch.dtype, device: torch.device) -> None:
        if self._inner.needs_scales and scales is None:
            raise ScaleError(
                f"quantizer protected needs a scale file for its inner {self._inner.name}: write one with "
                "`python -m calibration.run quantizer=protected` and pass it as scales=<file>"
            )
        self._inner.bind(layers, scales, dtype, device)  # it holds the static tensors
        self._wide.bind(layers, None, dtype, device)
        known = range(-len(layers), len(layers))
        for layer in (*self.layers, *(pair[0] for pair in self.heads)):
            require(layer in known, "protected layer", layer, f"{known.start} to {known.stop - 1} for this model")
        wide = {(i % len(layers), h) for i in self.layers for h in range(layers[i].H)}
        for i, head in self.heads:
            require(0 <= head < layers[i].H, f"protected head of layer {i}", head, f"0 to {layers[i].H - 1}")
            wide.add((i % len(layers), head))
        self._ranges = [self._cut(i, [(i, h) in wide for h in range(layer.H)]) for i, layer in enumerate(layers)]

    def _cut(self, layer: int, wide: list[bool]) -> list[_Range]:
        """The head ranges of both quantizers, cut where protection begins or ends."""
        ranges = []
        for owner in (self._inner, self._wide):
            for i, source in enumerate(owner.formats(layer)):
                for mine, run in groupby(source.heads, key=lambda head: wide[head] == (owner is self._wide)):
                    if mine:
                        heads = list(run)
                        cut = HeadFormat(range(heads[0], heads[-1] + 1), self._guard(source.k), self._guard(source.v))
                        within = slice(heads[0] - source.heads.start, heads[-1] + 1 - source.heads.start)
                        ranges.append(_Range(owner, i, source, within, cut))
        return sorted(ranges, key=lambda p: p.format.heads.start)

    def _guard(self, fmt: KVFormat) -> KVFormat:
        if fmt.raw:
            return fmt
        tail = fmt.tail_blocks if self.tail_blocks is None else max(fmt.tail_blocks, self.tail_blocks)
        unit = fmt.unit if self.tail_blocks is None else "block"
        return replace(fmt, sink_tokens=max(fmt.sink_tokens, self.sink_tokens), unit=unit, tail_blocks=tail)

    def formats(self, layer: int) -> list[HeadFormat]:
        return [p.format for p in self._ranges[layer]]

    def statics(self, layer: int) -> list[HeadStatics]:
        owned = ((p.owner.statics(layer)[p.range_index], p.within) for p in self._ranges[layer])
        return [HeadStatics(s.k.of_heads(within), s.v.of_heads(within)) for s, within in owned]

    def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
        """The owner encodes whole ranges of its own: the other heads are zeros, and its codes for them are dropped."""
        p = self._ranges[layer][range_index]
        fmt, blocks = p.source.of(side), x.shape[:-2]
        if fmt.unit == "token":
            x = x.flatten(0, -3)
        codes = p.owner.encode(_among(x, p, -2), side, layer, p.range_index)
        axis = _head_axis(fmt)
        mine = [codes.data[..., p.within, :], _narrow(codes.scale, p, axis), _narrow(codes.zero, p, axis)]
        data, scale, zero = (t if t is None or fmt.unit == "block" else t.unflatten(0, blocks) for t in mine)
        assert data is not None
        return Codes(data, scale, zero)

    def decode(self, codes: Codes, side: Side, layer: int, dtype: torch.dtype, range_index: int = 0) -> torch.Tensor:
        p = self._ranges[layer][range_index]
        fmt, blocks = p.source.of(side), codes.data.shape[:-2]
        axis = _head_axis(fmt)
        whole = Codes(_among(codes.data, p, -2), *(None if t is None else _among(t, p, axis) for t in codes[1:]))
        if fmt.unit == "block":
            return p.owner.decode(whole, side, layer, dtype, p.range_index)[..., p.within, :]
        rows = Codes(*(t if t is None else t.flatten(0, len(blocks) - 1) for t in whole))  # type: ignore[arg-type]
        return p.owner.decode(rows, side, layer, dtype, p.range_index)[..., p.within, :].unflatten(0, blocks)

    def static_tensors(self) -> list[StaticTensor]:
        return self._inner.static_tensors()

    def static_tensor(self, layer: int, side: Side, kind: str) -> torch.Tensor | None:
        return self._inner.static_tensor(layer, side, kind)

    def table(self, layer: int, side: Side) -> torch.Tensor | None:
        return self._inner.table(layer, side)

    def static_bytes(self) -> int:
        return self._inner.static_bytes() + self._wide.static_bytes()

    def raw_sink_tokens(self) -> int:
        return max(self._inner.raw_sink_tokens(), self.sink_tokens)

    def warnings(self) -> list[str]:
        return self._inner.warnings() + self._wide.warnings()


def _head_axis(fmt: KVFormat) -> int:
    """Of dynamic scales."""
    return -1 if fmt.scale == "token" else -2


def _narrow(t: torch.Tensor | None, p: _Range, axis: int) -> torch.Tensor | None:
    return None if t is None else t.narrow(axis, p.within.start, p.within.stop - p.within.start)


def _among(t: torch.Tensor, p: _Range, axis: int) -> torch.Tensor:
    """Heads `within`, with zeros for the other heads of the owner's range."""
    H = len(p.source.heads)
    if t.shape[axis] == H:
        return t
    shape = list(t.shape)
    shape[axis] = H
    whole = t.new_zeros(1, dtype=torch.uint8).to(t.dtype).expand(shape).clone()  # fp8 has no new_zeros everywhere
    whole.narrow(axis, p.within.start, t.shape[axis]).copy_(t)
    return whole
