"""The tensors of the paged cache: planes per layer and head range, and their copies in host memory.

Takes: formats and sizes. Gives: planes to read and write, byte-exact block copies, the arithmetic of what it takes.
Does not know about: requests, which block belongs to whom, how codes are made.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from qkv.layout import SIDES, HeadFormat, HeadStatics, KVFormat, LayerShape, Side, Statics
from qkv.types import NULL_BLOCK, BlockId
from qkv_kernels.reference.planes import Plane


class HeadPlanes(NamedTuple):
    """The planes of one head range of one layer; shapes as in layout.py, None where scales are static or absent."""

    heads: range
    k: Plane
    v: Plane

    def of(self, side: Side) -> Plane:
        return self.k if side == "k" else self.v

    def with_statics(self, statics: HeadStatics) -> "HeadPlanes":
        """The same planes, joined by the quantizer's static parameters: what a kernel reads."""

        def joined(plane: Plane, s: Statics) -> Plane:
            return plane._replace(static_scale=s.scale, static_zero=s.zero, table=s.table)

        return HeadPlanes(self.heads, joined(self.k, statics.k), joined(self.v, statics.v))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every plane of blocks that exists, in the order a host block concatenates them."""
        return self.k.pool + self.v.pool


class KVStore:
    """num_blocks blocks of block_size tokens (block 0 is the null block, always zero) and host_blocks blocks to swap to.

    The engine makes one when it starts; the backend writes and reads its planes in every layer of every step; the engine's loop
    calls the copies between steps, when the scheduler's plan swaps a request out or in.

    formats: one list per layer, as Quantizer.formats() gives them. fingerprint: identity of what the bytes mean, beyond
    the layout. slots: raw tails (one per running request) and raw sinks, of raw_dtype, where formats have them.
    static_bytes: what the quantizer's static tensors take; they are not here, but in the memory report.
    poison: fill all pages but the null block, and all slots, with NaN, to show that nothing reads what was not written.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        formats: list[list[HeadFormat]],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        host_blocks: int = 0,
        fingerprint: str = "",
        poison: bool = False,
        slots: int = 1,
        raw_dtype: torch.dtype = torch.float32,
        static_bytes: int = 0,
    ) -> None:
        self.layers, self.formats = layers, formats
        self.slots, self._raw_dtype, self.static_bytes = slots, raw_dtype, static_bytes
        self.num_blocks, self.block_size, self.device, self.host_blocks = num_blocks, block_size, device, host_blocks
        self._planes = [[self._allocate(layer, r) for r in ranges] for layer, ranges in zip(layers, formats, strict=True)]
        self._tensors = [t for ranges in self._planes for p in ranges for t in p.tensors]
        planes = [p.of(side) for ranges in self._planes for p in ranges for side in SIDES]
        self._tails = [p.tail for p in planes if p.tail is not None]
        self._sinks = [p.sink for p in planes if p.sink is not None]
        self.raw_bytes = sum(t.nbytes for t in (*self._tails, *self._sinks))
        self._host: torch.Tensor | None = None
        sizes = [f"{la.index}:{r.heads}:{la.Dk}:{la.Dv}:{r.k.fingerprint()}/{r.v.fingerprint()}" for la, r in self._ranges()]
        self.fingerprint = f"{fingerprint}|{block_size}|{';'.join(sizes)}"
        self.block_bytes = block_bytes(layers, formats, block_size)
        self.pool_bytes = num_blocks * self.block_bytes
        if poison:
            self.poison_blocks([b for b in range(num_blocks) if b != NULL_BLOCK])
            for plane in (*self._tails, *self._sinks):
                plane.fill_(torch.nan)

    def planes(self, layer: int) -> list[HeadPlanes]:
        """Planes of a layer (position in `layers`), one entry per head range. Backends take them once, when they are bound."""
        return self._planes[layer]

    def copy_out(self, device_ids: list[BlockId], host_ids: list[BlockId]) -> None:
        """Device blocks to host blocks, byte for byte. Raises ValueError for ids out of range or lists of unequal length."""
        host, source = self._host_pool(), self._checked(device_ids, host_ids)
        target, offset = torch.tensor(host_ids, dtype=torch.int64), 0
        for plane in self._bytes():
            rows = plane.index_select(0, source)
            host[:, offset : offset + plane.shape[1]].index_copy_(0, target, rows.cpu())
            offset += plane.shape[1]

    def copy_in(self, device_ids: list[BlockId], host_ids: list[BlockId]) -> None:
        """Host blocks to device blocks, byte for byte. Raises ValueError for ids out of range or lists of unequal length."""
        host, target = self._host_pool(), self._checked(device_ids, host_ids)
        source, offset = torch.tensor(host_ids, dtype=torch.int64), 0
        for plane in self._bytes():
            rows = host[:, offset : offset + plane.shape[1]].index_select(0, source)
            plane.index_copy_(0, target, rows.to(self.device))
            offset += plane.shape[1]

    def copy_raw_out(self, tail_slot: int, sink_slot: int, host_ids: Sequence[BlockId]) -> None:
        """The raw rows of one request to host blocks, byte for byte: called when the request is swapped out, next to copy_out.

        A slot is ignored where no format keeps such rows.
        """
        rows = [t[slot].flatten().view(torch.uint8) for t, slot in self._raw(tail_slot, sink_slot)]
        data = torch.cat(rows).cpu()
        self._host_pool()[torch.tensor(host_ids)] = torch.nn.functional.pad(
            data, (0, len(host_ids) * self.block_bytes - len(data))
        ).view(len(host_ids), -1)

    def copy_raw_in(self, tail_slot: int, sink_slot: int, host_ids: Sequence[BlockId]) -> None:
        """What copy_raw_out wrote, back from host blocks into the request's new slots: called when the request is swapped in."""
        data, offset = self._host_pool()[torch.tensor(host_ids)].flatten().to(self.device), 0
        for plane, slot in self._raw(tail_slot, sink_slot):
            row = plane[slot].flatten().view(torch.uint8)
            row.copy_(data[offset : offset + len(row)])
            offset += len(row)

    def _raw(self, tail_slot: int, sink_slot: int) -> list[tuple[torch.Tensor, int]]:
        return [(t, tail_slot) for t in self._tails] + [(t, sink_slot) for t in self._sinks]

    def poison_blocks(self, ids: list[BlockId]) -> None:
        """Fill blocks with garbage that shows: NaN for floats and fp8, 127 for integer codes. Never the null block.

        Tests and engines in poison mode call it on blocks that nobody owns.
        """
        where = self._checked(ids)
        for plane in self._tensors:
            if plane.dtype.itemsize == 1:  # 0x7F is NaN in both fp8 formats, 127 in int8
                plane.view(torch.uint8).index_fill_(0, where, 0x7F)
            else:
                plane.index_fill_(0, where, torch.nan)

    def check_null(self) -> None:
        """Raises AssertionError if anything was ever written to the null block. Called by Engine.check and by tests."""
        for i, ranges in enumerate(self._planes):
            if any(bool(t[NULL_BLOCK].flatten().view(torch.uint8).any()) for p in ranges for t in p.tensors):
                raise AssertionError(f"the null block was written: layer {self.layers[i].index}")

    @property
    def host_bytes(self) -> int:
        """Host memory allocated for swapping: none until the first swap."""
        return 0 if self._host is None else self._host.numel()

    def memory_report(self) -> dict[str, float]:
        """What the cache takes; Engine.metrics() puts it into every record.

        Bytes, except effective_bits_*, which are the marginal bits per element of a full block.
        pool_bytes includes the null block; scale_bytes are scales and zeros, pool and static; tail_bytes are the raw rows of
        tails and sinks; allocated_bytes is pool + static + tail.
        """
        B, N = self.block_size, self.num_blocks
        codes = 0
        stored, elements = dict.fromkeys(SIDES, 0), dict.fromkeys(SIDES, 0)
        for layer, r in self._ranges():
            for side in SIDES:
                fmt, H, D = r.of(side), len(r.heads), layer.dim(side)
                codes += B * H * fmt.packed_dim(D) * fmt.storage.itemsize
                stored[side] += fmt.bytes_per_block(B, H, D)
                elements[side] += B * H * D
        return {
            "pool_bytes": self.pool_bytes,
            "static_bytes": self.static_bytes,
            "scale_bytes": N * (self.block_bytes - codes) + self.static_bytes,
            "tail_bytes": self.raw_bytes,
            "allocated_bytes": self.pool_bytes + self.static_bytes + self.raw_bytes,
            "kv_bytes_per_token": self.block_bytes / B,
            "effective_bits_k": 8 * stored["k"] / elements["k"],
            "effective_bits_v": 8 * stored["v"] / elements["v"],
            "null_block_bytes": self.block_bytes,
            "host_bytes": self.host_bytes,
        }

    def _ranges(self) -> list[tuple[LayerShape, HeadFormat]]:
        return [(layer, r) for layer, ranges in zip(self.layers, self.formats, strict=True) for r in ranges]

    def _allocate(self, layer: LayerShape, r: HeadFormat) -> HeadPlanes:
        def plane(side: Side) -> Plane:
            fmt, N, H, B, D = r.of(side), self.num_blocks, len(r.heads), self.block_size, layer.dim(side)
            shape = fmt.scale_shape(N, H, B, D)
            return Plane(
                fmt,
                codes=self._zeros((N, H, B, fmt.packed_dim(D)), fmt.storage),
                scale=self._zeros(shape, fmt.scale_dtype) if shape else None,
                zero=self._zeros(shape, fmt.scale_dtype) if shape and fmt.zero != "none" else None,
                tail=raw(fmt.tail_rows(B), H, D),
                sink=raw(fmt.sink_tokens, H, D),
            )

        def raw(rows: int, H: int, D: int) -> torch.Tensor | None:
            return self._zeros((self.slots, H, rows, D), self._raw_dtype) if rows else None

        return HeadPlanes(r.heads, plane("k"), plane("v"))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # empty + zero_ touches every page now; zeros would leave the faults to the first requests
        out = torch.empty(shape, dtype=dtype, device=self.device)
        out.view(torch.uint8).zero_()
        return out

    def _bytes(self) -> list[torch.Tensor]:
        """Every plane as [N, bytes per block] uint8 views."""
        return [t.flatten(1).view(torch.uint8) for t in self._tensors]

    def reserve_host(self) -> None:
        """Allocate the host blocks now; otherwise the first copy does."""
        self._host_pool()

    def free(self) -> None:
        """Give the memory back, whoever still holds the planes. Nothing may use the store afterwards."""
        for tensor in (*self._tensors, *self._tails, *self._sinks, *([] if self._host is None else [self._host])):
            storage = tensor.untyped_storage()
            if storage.resizable():  # not while NumPy looks at it
                storage.resize_(0)

    def _host_pool(self) -> torch.Tensor:
        if self._host is None:
            pinned = self.device.type == "cuda"
            self._host = torch.empty(self.host_blocks, self.block_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._host

    def _checked(self, ids: list[BlockId], host_ids: list[BlockId] | None = None) -> torch.Tensor:
        if any(not NULL_BLOCK < b < self.num_blocks for b in ids):
            raise ValueError(f"block ids {ids} must be in 1..{self.num_blocks - 1}; 0 is the null block")
        if host_ids is not None and (len(ids) != len(host_ids) or any(not 0 <= b < self.host_blocks for b in host_ids)):
            raise ValueError(f"host block ids {host_ids} must be {len(ids)} ids in 0..{self.host_blocks - 1}")
        return torch.tensor(ids, dtype=torch.int64, device=self.device)


def block_bytes(layers: list[LayerShape], formats: list[list[HeadFormat]], block_size: int) -> int:
    """Bytes of one block over all layers: what sizing a pool divides by."""
    return sum(fmt.bytes_per_block(block_size, H, D) for fmt, H, D in _sides(layers, formats))


def raw_slot_bytes(layers: list[LayerShape], formats: list[list[HeadFormat]], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of raw tail and sink rows per slot, over all layers."""
    return dtype.itemsize * sum(H * (fmt.tail_rows(block_size) + fmt.sink_tokens) * D for fmt, H, D in _sides(layers, formats))


def _sides(layers: list[LayerShape], formats: list[list[HeadFormat]]) -> list[tuple[KVFormat, int, int]]:
    """Format, kv heads and head dim of K and of V of every head range of every layer."""
    return [
        (r.of(side), len(r.heads), layer.dim(side))
        for layer, ranges in zip(layers, formats, strict=True)
        for r in ranges
        for side in SIDES
    ]
