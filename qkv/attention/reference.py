"""The reference backend: torch, unfused, runs every format. What the other backends are compared with.

Takes: Q, K, V of one layer. Gives: attention read from the pool. Does not know about: requests, scheduling, transformers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from qkv.attention.base import BACKENDS, AttentionBackend, Reads
from qkv.layout import SIDES, AttentionMetadata, Codes, KVFormat, LayerShape, Side
from qkv_kernels.reference import codec, tail
from qkv_kernels.reference.append import append, append_blocks
from qkv_kernels.reference.attend import Cohort, Rule, attend, cohorts
from qkv_kernels.reference.overlay import Rows
from qkv_kernels.reference.planes import Plane

if TYPE_CHECKING:
    from qkv.cache.store import KVStore
    from qkv.policies.quantizer.base import Quantizer


@BACKENDS.register("reference")
@dataclass
class ReferenceBackend(AttentionBackend):
    """The quantizer's own encode, a scatter, then paged attention that decodes by format, or by the quantizer's own decode."""

    fused: ClassVar[bool] = False
    keeps_raw_rows: ClassVar[bool] = True

    def supports(self, k: KVFormat, v: KVFormat, layer: LayerShape, B: int, device: torch.device) -> str | None:
        return codec.refusal(k, layer.Dk) or codec.refusal(v, layer.Dv)

    def bind(self, store: "KVStore", quantizer: "Quantizer", layers: list[LayerShape], reads: Reads, deterministic: bool) -> None:
        super().bind(store, quantizer, layers, reads, deterministic)
        self._raw, self._deterministic = reads == "raw", deterministic
        for layer, ranges in enumerate(self._planes):
            for i, planes in enumerate(ranges):
                ranges[i] = planes._replace(k=self._readable(planes.k, "k", layer, i), v=self._readable(planes.v, "v", layer, i))

    def _readable(self, plane: Plane, side: Side, layer: int, range_index: int) -> Plane:
        """The plane with the quantizer's decode, where its format says that the quantizer reads it."""
        if plane.fmt.reading != "quantizer":
            return plane

        def decode(
            codes: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, dtype: torch.dtype
        ) -> torch.Tensor:
            return self._quantizer.decode(Codes(codes, scale, zero), side, layer, dtype, range_index)

        return plane._replace(decode=decode)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: AttentionMetadata,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape = self._layers[layer]
        G = shape.Hq // shape.H
        outs = []
        for range_index, planes in enumerate(self._planes[layer]):
            heads = planes.heads
            kv, qs = slice(heads.start, heads.stop), slice(heads.start * G, heads.stop * G)
            rows = {"k": k[:, kv], "v": v[:, kv]}
            for side in SIDES:
                encode = partial(self._quantizer.encode, side=side, layer=layer, range_index=range_index)
                store(planes.of(side), rows[side], encode, meta)
            out = attend(
                q[:, qs],
                planes.k,
                planes.v,
                meta.block_table,
                meta.positions,
                meta.query_start_list,
                meta.seq_lens_list,
                meta.num_decodes,
                Rule(shape.scaling, shape.window, shape.softcap, None if sink_logits is None else sink_logits[qs]),
                Rows(rows["k"], rows["v"], self._raw, meta.tail_slots, meta.sink_slots),
                deterministic=self._deterministic,
            )
            for side in SIDES:
                if (ring := planes.of(side).tail) is not None:
                    for cohort, slots, starts in _cohorts(meta, meta.tail_slots):
                        tail.keep(ring, _of(cohort, rows[side]), slots, starts)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def store(plane: Plane, rows: torch.Tensor, encode: Callable[[torch.Tensor], Codes], meta: AttentionMetadata) -> None:
    """Encode and write what this call makes final: its rows, or for block-unit formats the blocks that it completes."""
    if plane.sink is not None:
        for cohort, slots, starts in _cohorts(meta, meta.sink_slots):
            tail.keep_first(plane.sink, _of(cohort, rows), slots, starts)
    if plane.tail is None:
        codes = encode(rows)
        for pool, new in ((plane.codes, codes.data), (plane.scale, codes.scale), (plane.zero, codes.zero)):
            if pool is not None and new is not None:
                append(pool, new, meta.slots)
        return
    for cohort, slots, starts in _cohorts(meta, meta.tail_slots):
        seen = tail.window(plane.tail, _of(cohort, rows), slots, starts, meta.block_size)
        blocks, request, which = tail.completed(seen, starts, cohort.t, meta.block_size)
        if len(blocks):
            ids = meta.block_table[cohort.requests][request, which].long()
            codes = encode(blocks)
            append_blocks(plane.codes, codes.data.transpose(1, 2), ids)
            for pool, new in ((plane.scale, codes.scale), (plane.zero, codes.zero)):
                if pool is not None and new is not None:
                    append_blocks(pool, new if plane.fmt.scale == "block_channel" else new.transpose(1, 2), ids)


def _cohorts(meta: AttentionMetadata, slots: torch.Tensor | None) -> Iterator[tuple[Cohort, torch.Tensor, torch.Tensor]]:
    """The cohorts of the call, with their slots [R] and the positions [R] of their first rows."""
    assert slots is not None, "the formats keep raw rows, but the metadata names no slots for them"
    for cohort in cohorts(meta.query_start_list, meta.seq_lens_list, meta.num_decodes, 1):
        yield cohort, slots[cohort.requests], meta.positions[cohort.rows][:: cohort.t]


def _of(cohort: Cohort, rows: torch.Tensor) -> torch.Tensor:
    """The cohort's rows of [T, H, D], as [R, t, H, D]."""
    return rows[cohort.rows].unflatten(0, (cohort.R, cohort.t))
