"""The reference backend: torch, unfused, runs every format its codec knows. What the other backends are compared with.

Takes: Q, K, V of one layer. Gives: attention read from the pool. Does not know about: requests, scheduling, transformers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from qkv.attention.base import BACKENDS, AttentionBackend, Reads
from qkv.layout import AttentionMetadata, Codes, KVFormat, LayerShape
from qkv_kernels.reference import codec, tail
from qkv_kernels.reference.append import append, append_blocks
from qkv_kernels.reference.attend import Group, Rule, attend, groups
from qkv_kernels.reference.overlay import Rows
from qkv_kernels.reference.planes import Plane

if TYPE_CHECKING:
    from qkv.cache.store import KVStore
    from qkv.policies.quantizer.base import Quantizer


@BACKENDS.register("reference")
@dataclass
class ReferenceBackend(AttentionBackend):
    """The quantizer's own encode, a scatter, then paged attention that decodes by format."""

    fused: ClassVar[bool] = False
    keeps_raw_rows: ClassVar[bool] = True

    def supports(self, k: KVFormat, v: KVFormat, layer: LayerShape, B: int, device: torch.device) -> str | None:
        return codec.refusal(k, layer.Dk) or codec.refusal(v, layer.Dv)

    def bind(self, store: "KVStore", quantizer: "Quantizer", layers: list[LayerShape], reads: Reads, deterministic: bool) -> None:
        self._quantizer, self._layers, self._raw, self._deterministic = quantizer, layers, reads == "raw", deterministic
        self._planes = [
            [
                (
                    p.heads,
                    Plane(p.k_format, p.k_codes, p.k_scale, p.k_zero, s.k_scale, s.k_zero, p.k_tail, p.k_sink),
                    Plane(p.v_format, p.v_codes, p.v_scale, p.v_zero, s.v_scale, s.v_zero, p.v_tail, p.v_sink),
                )
                for p, s in zip(store.planes(i), quantizer.statics(i), strict=True)
            ]
            for i in range(len(layers))
        ]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape = self._layers[layer]
        G = shape.Hq // shape.H
        outs = []
        for part, (heads, k_plane, v_plane) in enumerate(self._planes[layer]):
            kv, qs = slice(heads.start, heads.stop), slice(heads.start * G, heads.stop * G)
            sides = ((k_plane, k[:, kv], self._quantizer.encode_k), (v_plane, v[:, kv], self._quantizer.encode_v))
            for plane, rows, encode in sides:
                store(plane, rows, partial(encode, layer=layer, part=part), meta)
            out = attend(
                q[:, qs],
                k_plane,
                v_plane,
                meta.block_table,
                meta.positions,
                meta.query_start_list,
                meta.seq_lens_list,
                meta.num_decodes,
                Rule(shape.scaling, shape.window, shape.softcap, None if sinks is None else sinks[qs]),
                Rows(k[:, kv], v[:, kv], self._raw, meta.tail_slots, meta.sink_slots),
                deterministic=self._deterministic,
            )
            for plane, rows, _ in sides:
                if plane.tail is not None:
                    for group, slots, starts in _groups(meta, meta.tail_slots):
                        tail.keep(plane.tail, _grouped(rows, group), slots, starts)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def store(plane: Plane, rows: torch.Tensor, encode: Callable[[torch.Tensor], Codes], meta: AttentionMetadata) -> None:
    """Encode and write what this call makes final: its rows, or for block-unit formats the blocks that it completes."""
    if plane.sink is not None:
        for group, slots, starts in _groups(meta, meta.sink_slots):
            tail.keep_first(plane.sink, _grouped(rows, group), slots, starts)
    if plane.tail is None:
        codes = encode(rows)
        for pool, new in ((plane.codes, codes.data), (plane.scale, codes.scale), (plane.zero, codes.zero)):
            if pool is not None and new is not None:
                append(pool, new, meta.slots)
        return
    for group, slots, starts in _groups(meta, meta.tail_slots):
        seen = tail.window(plane.tail, _grouped(rows, group), slots, starts, meta.block_size)
        blocks, request, which = tail.completed(seen, starts, group.t, meta.block_size)
        if len(blocks):
            ids = meta.block_table[group.requests][request, which].long()
            codes = encode(blocks)
            append_blocks(plane.codes, codes.data.transpose(1, 2), ids)
            for pool, new in ((plane.scale, codes.scale), (plane.zero, codes.zero)):
                if pool is not None and new is not None:
                    append_blocks(pool, new if plane.fmt.scale == "block_channel" else new.transpose(1, 2), ids)


def _groups(meta: AttentionMetadata, slots: torch.Tensor | None) -> Iterator[tuple[Group, torch.Tensor, torch.Tensor]]:
    """Requests worked on together, with their slots [R] and the positions [R] of their first rows."""
    assert slots is not None, "the formats keep raw rows, but the metadata names no slots for them"
    for group in groups(meta.query_start_list, meta.seq_lens_list, meta.num_decodes, 1):
        yield group, slots[group.requests], meta.positions[group.rows][:: group.t]


def _grouped(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """[T, H, D] -> [R, t, H, D]."""
    return rows[group.rows].unflatten(0, (group.R, group.t))
