"""The reference backend: torch, unfused, runs every format its codec knows. What the other backends are compared with.

Takes: Q, K, V of one layer. Gives: attention read from the pool. Does not know about: requests, scheduling, transformers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qkv.attention.base import BACKENDS, AttentionBackend, Reads
from qkv.layout import AttentionMetadata, Codes, KVFormat, LayerShape
from qkv_kernels.reference import codec
from qkv_kernels.reference.append import append
from qkv_kernels.reference.attend import Plane, Rule, attend

if TYPE_CHECKING:
    from qkv.cache.store import KVStore
    from qkv.policies.quantizer.base import Quantizer


@BACKENDS.register("reference")
@dataclass
class ReferenceBackend(AttentionBackend):
    """The quantizer's own encode, a scatter, then paged attention that decodes by format."""

    fused: ClassVar[bool] = False

    def supports(self, k: KVFormat, v: KVFormat, layer: LayerShape, B: int, device: torch.device) -> str | None:
        return codec.refusal(k, layer.Dk) or codec.refusal(v, layer.Dv)

    def bind(self, store: "KVStore", quantizer: "Quantizer", layers: list[LayerShape], reads: Reads, deterministic: bool) -> None:
        self._quantizer, self._layers, self._raw, self._deterministic = quantizer, layers, reads == "raw", deterministic
        self._planes = [
            [
                (
                    p.heads,
                    Plane(p.k_format, p.k_codes, p.k_scale, p.k_zero, s.k_scale, s.k_zero),
                    Plane(p.v_format, p.v_codes, p.v_scale, p.v_zero, s.v_scale, s.v_zero),
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
            _store(k_plane, self._quantizer.encode_k(k[:, kv], layer, part), meta.slots)
            _store(v_plane, self._quantizer.encode_v(v[:, kv], layer, part), meta.slots)
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
                raw=(k[:, kv], v[:, kv]) if self._raw else None,
                deterministic=self._deterministic,
            )
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _store(plane: Plane, codes: Codes, slots: torch.Tensor) -> None:
    for pool, rows in ((plane.codes, codes.data), (plane.scale, codes.scale), (plane.zero, codes.zero)):
        if pool is not None and rows is not None:
            append(pool, rows, slots)
