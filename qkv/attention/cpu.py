"""The backend of fused C++ kernels for CPUs.

Takes: Q, K, V of one layer. Gives: attention read from the pool. Does not know about: requests, scheduling, transformers.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from qkv.attention.base import BACKENDS, AttentionBackend, Reads
from qkv.attention.reference import store
from qkv.layout import SIDES, AttentionMetadata, KVFormat, LayerShape
from qkv_kernels import cpu

if TYPE_CHECKING:
    from qkv.cache.store import HeadPlanes, KVStore
    from qkv.policies.quantizer.base import Quantizer

log = logging.getLogger(__name__)


class _Range(NamedTuple):
    """One head range of a layer, with its planes as the operator takes them."""

    kv: slice
    queries: slice
    planes: "HeadPlanes"
    tensors: list[torch.Tensor]
    formats: list[int]


@BACKENDS.register("cpu")
@dataclass
class CpuBackend(AttentionBackend):
    """Store and attend in one operator, on torch's threads. Every affine format. Compiled on first use, or declined."""

    fused: ClassVar[bool] = True
    keeps_raw_rows: ClassVar[bool] = True

    def supports(self, k: KVFormat, v: KVFormat, layer: LayerShape, B: int, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"the cpu kernels do not run on {device.type}"
        if layer.Hq // layer.H > cpu.MAX_QUERIES_PER_KV_HEAD:
            return (
                f"the cpu kernels take at most {cpu.MAX_QUERIES_PER_KV_HEAD} query heads per kv head, not {layer.Hq // layer.H}"
            )
        return cpu.refusal(k, layer.Dk) or cpu.refusal(v, layer.Dv)

    def declines(self, dtype: torch.dtype, reads: Reads, deterministic: bool) -> str | None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the cpu kernels do not compute in {dtype}"
        if reads == "raw":
            return "the cpu kernels read what is stored; attention.reads=raw needs the reference"
        return _unavailable()

    def bind(self, store: "KVStore", quantizer: "Quantizer", layers: list[LayerShape], reads: Reads, deterministic: bool) -> None:
        if reason := self.declines(torch.float32, reads, deterministic):
            raise RuntimeError(reason)
        super().bind(store, quantizer, layers, reads, deterministic)
        self._deterministic = deterministic
        self._custom, self._isa = quantizer.encode_rule == "custom", cpu.instruction_set()
        self._ranges = [[_range(p, la) for p in ranges] for ranges, la in zip(self._planes, layers, strict=True)]
        for plane in {t.data_ptr(): t for i in range(len(layers)) for p in store.planes(i) for t in p.tensors}.values():
            torch.ops.qkv_cpu.advise_huge(plane)

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
        outs = []
        for i, heads in enumerate(self._ranges[layer]):
            rows = {"k": k[:, heads.kv], "v": v[:, heads.kv]}
            if self._custom:
                for side in SIDES:
                    encode = partial(self._quantizer.encode, side=side, layer=layer, range_index=i)
                    store(heads.planes.of(side), rows[side], encode, meta)
            out = cpu.attend(
                q[:, heads.queries],
                rows["k"],
                rows["v"],
                heads.tensors,
                meta.block_table,
                meta.query_start,
                meta.slots,
                meta.positions,
                None if sink_logits is None else sink_logits[heads.queries],
                heads.formats,
                shape.scaling,
                shape.window,
                shape.softcap,
                store=not self._custom,
                deterministic=self._deterministic,
                isa=self._isa,
                tail_slots=meta.tail_slots,
                sink_slots=meta.sink_slots,
            )
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _range(planes: "HeadPlanes", layer: LayerShape) -> _Range:
    G, heads = layer.Hq // layer.H, planes.heads
    tensors = [t for side in SIDES for t in cpu.expand(planes.of(side), layer.dim(side))]
    formats = [n for side in SIDES for n in cpu.format_numbers(planes.of(side).fmt)]
    return _Range(slice(heads.start, heads.stop), slice(heads.start * G, heads.stop * G), planes, tensors, formats)


@lru_cache
def _unavailable() -> str | None:
    """Builds and loads the kernels; the reason if that fails, with one warning."""
    try:
        cpu.load()
    except (cpu.BuildError, OSError) as error:
        reason = f"the cpu kernels cannot be built: {error}"
        log.warning("%s; attention runs on the reference backend, which is slow", reason)
        return reason
    return None
