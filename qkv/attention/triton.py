"""The Triton backend: codes are written and read by fused kernels on a GPU.

Takes: Q, K, V of one layer. Gives: attention read from the pool. Does not know about: requests, scheduling, transformers.
Imports triton only once it is bound.
"""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qkv.attention.base import BACKENDS, AttentionBackend, Reads
from qkv.errors import ConfigError
from qkv.layout import SIDES, AttentionMetadata, KVFormat, LayerShape
from qkv_kernels.reference.attend import Rule
from qkv_kernels.reference.overlay import Rows
from qkv_kernels.triton import spec

if TYPE_CHECKING:
    from qkv.cache.store import HeadPlanes, KVStore
    from qkv.policies.quantizer.base import Quantizer

MIN_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies
MIN_BLOCK_SIZE = 8
MAX_BLOCK_SIZE = 256


@BACKENDS.register("triton")
@dataclass
class TritonBackend(AttentionBackend):
    """Encode and scatter in one launch, then split decode and chunked prefill that dequantize on the way to the matrix unit.

    Reads `cache` only, and not in deterministic mode: fixed tiles are the reference's. Custom encoders run in Python, their rows
    are scattered by a kernel; reading stays fused.
    """

    fused: ClassVar[bool] = True
    keeps_raw_rows: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    def supports(self, k: KVFormat, v: KVFormat, layer: LayerShape, B: int, device: torch.device) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        if device.type != "cuda":
            return f"Triton kernels need a GPU, and the model is on {device.type}"
        if not torch.version.hip and (has := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
            return f"Triton kernels need compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer, this GPU has {has}"
        if layer.Hq // layer.H > spec.MAX_QUERIES_PER_KV_HEAD:
            return f"{layer.Hq // layer.H} query heads share a kv head; Triton kernels take up to {spec.MAX_QUERIES_PER_KV_HEAD}"
        if B < MIN_BLOCK_SIZE:
            return f"block_size {B} is below {MIN_BLOCK_SIZE}"
        if B > MAX_BLOCK_SIZE:
            return f"block_size {B} is above {MAX_BLOCK_SIZE}"
        return spec.refusal(k, layer.Dk) or spec.refusal(v, layer.Dv) or spec.pair_refusal(k, v)

    def declines(self, dtype: torch.dtype, reads: Reads, deterministic: bool) -> str | None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"Triton kernels do not compute in {dtype}"
        if reads == "raw":
            return "Triton kernels read what is stored; attention.reads=raw needs the reference"
        if deterministic:
            return "Triton kernels split keys by the batch; runner.deterministic=true needs the reference"
        return None

    def bind(self, store: "KVStore", quantizer: "Quantizer", layers: list[LayerShape], reads: Reads, deterministic: bool) -> None:
        from qkv_kernels.triton import tuning

        super().bind(store, quantizer, layers, reads, deterministic)
        self._custom, self._processors = quantizer.encode_rule == "custom", tuning.processors(store.device)
        if self._custom and any(p.k.tail is not None for ranges in self._planes for p in ranges):
            raise ConfigError(
                f"quantizer {quantizer.name} encodes whole blocks in Python, which the triton backend runs for single tokens "
                "only: use attention.backend=reference, or an encode_rule of minmax, absmax or static"
            )

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: AttentionMetadata,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from qkv_kernels.triton import blocks
        from qkv_kernels.triton.decode import decode, split_count
        from qkv_kernels.triton.extend import extend

        shape, n, R = self._layers[layer], meta.num_decodes, len(meta.seq_lens_list)
        G, rows = shape.Hq // shape.H, meta.query_start_list[-1]
        out = q.new_empty(len(q), shape.Hq, shape.Dv)
        out[rows:].zero_()
        for range_index, planes in enumerate(self._planes[layer]):
            heads, k_plane, v_plane = planes
            kv, qs = slice(heads.start, heads.stop), slice(heads.start * G, heads.stop * G)
            new = Rows(k[:, kv], v[:, kv], tail_slots=meta.tail_slots, sink_slots=meta.sink_slots)
            self._store(layer, range_index, new, planes, meta)
            rule = Rule(shape.scaling, shape.window, shape.softcap, None if sink_logits is None else sink_logits[qs])
            if n:
                splits = split_count(n, len(heads), max(meta.seq_lens_list[:n]), self._processors)
                decode(q[:n, qs], k_plane, v_plane, meta.block_table[:n], meta.seq_lens[:n], rule, out[:n, qs], splits, new)
            if n < R:
                later = [None if s is None else s[n:] for s in (meta.tail_slots, meta.sink_slots)]
                extend(
                    q[:, qs],
                    k_plane,
                    v_plane,
                    meta.block_table[n:],
                    meta.query_start[n:],
                    meta.seq_lens[n:],
                    _longest(meta, n),
                    rule,
                    out[:, qs],
                    Rows(new.k, new.v, False, *later),
                )
            if k_plane.tail is not None:
                blocks.keep_last(new, k_plane, v_plane, meta.query_start, meta.seq_lens, _longest(meta))
        return out

    def _store(self, layer: int, range_index: int, new: Rows, planes: "HeadPlanes", meta: AttentionMetadata) -> None:
        """Encode and write what this call makes final: its rows, or for block-unit formats the blocks that it completes."""
        from qkv_kernels.triton import append, blocks

        k, v = planes.k, planes.v
        if k.sink is not None:
            blocks.keep_first(new, k, v, meta.query_start, meta.seq_lens, _longest(meta))
        if k.tail is not None:
            blocks.seal(new, k, v, meta.block_table, meta.query_start, meta.seq_lens, _longest(meta))
        elif self._custom:
            self._store_custom(layer, range_index, new, planes, meta.slots)
        else:
            append.append(new.k, new.v, k, v, meta.slots)

    def _store_custom(self, layer: int, range_index: int, new: Rows, planes: "HeadPlanes", slots: torch.Tensor) -> None:
        from qkv_kernels.triton.append import scatter

        for side, rows in zip(SIDES, (new.k, new.v), strict=True):
            plane, codes = planes.of(side), self._quantizer.encode(rows, side, layer, range_index)
            for pool, part in ((plane.codes, codes.data), (plane.scale, codes.scale), (plane.zero, codes.zero)):
                if pool is not None and part is not None:
                    scatter(pool, part, slots)


def _longest(meta: AttentionMetadata, first: int = 0) -> int:
    """Rows of the longest request from `first` on."""
    starts = meta.query_start_list
    return max(b - a for a, b in zip(starts[first:], starts[first + 1 :], strict=False))
