"""Checks formats that keep raw rows on a GPU: whole steps of the triton backend against the reference backend on the CPU.

Takes: a format's name. Gives: what differs. Imports the library, but no Hydra. Does not know about: timing, records.
"""

from typing import Any, ClassVar, Literal

import torch

from experiments.gpu.kernel_cases import RAW_ROW_FORMATS
from qkv.attention.base import AttentionBackend
from qkv.attention.reference import ReferenceBackend
from qkv.attention.triton import TritonBackend
from qkv.cache.store import KVStore
from qkv.layout import SIDES, AttentionMetadata, HeadFormat, HeadStatics, KVFormat, LayerShape, Statics
from qkv.policies.quantizer._affine import AffineQuantizer

B, H, G, REQUESTS = 16, 2, 4, 3
# New tokens of every request in each step: chunks, decodes until blocks are completed and rings wrap, a chunk again.
STEPS = ([90, 17, 33], *[[1, 1, 1]] * 18, [40, 3, 20], [1, 1, 1])


class _Fixed(AffineQuantizer):
    """A quantizer that stores K and V in the given formats. Where these want static scales, they are such that 4 standard
    deviations fit."""

    encode_rule: ClassVar[Literal["static"]] = "static"
    name = "fixed"

    def __init__(self, k: KVFormat, v: KVFormat) -> None:
        self._formats = k, v

    def formats(self, layer: int) -> list[HeadFormat]:
        return self.whole(layer, *self._formats)

    def statics(self, layer: int) -> list[HeadStatics]:
        D = self._layers[layer].Dk
        scales = [torch.full((H, D), 4 / 127, device=self._device) if f.scale == "channel" else None for f in self._formats]
        return [HeadStatics(*map(Statics, scales))]

    def on(self, layer: LayerShape, dtype: torch.dtype, device: torch.device) -> "_Fixed":
        self._device = device
        self.bind([layer], None, dtype, device)
        return self


def check_raw_rows(name: str, device_name: str, dtype_name: str, head_dim: int = 128) -> dict[str, Any]:
    """Run the steps on both backends and compare. errors: empty if the outputs of every step are within tolerance and if codes,
    scales, tails and sink tokens are equal to the byte in the end."""
    dtype, layer = getattr(torch, dtype_name), LayerShape(0, H, H * G, head_dim, head_dim, head_dim**-0.5)
    rigs = [
        _Rig(backend, RAW_ROW_FORMATS[name], layer, dtype, torch.device(device))
        for backend, device in ((TritonBackend(), device_name), (ReferenceBackend(), "cpu"))
    ]
    generator, done, worst, errors = torch.Generator().manual_seed(3), [0] * REQUESTS, 0.0, []
    limit = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    for i, counts in enumerate(STEPS):
        done = [n + new for n, new in zip(done, counts, strict=True)]
        rows = [torch.randn(sum(counts), heads, head_dim, generator=generator).to(dtype) for heads in (H * G, H, H)]
        got, want = (rig.step(rows, counts, done) for rig in rigs)
        error = float((got - want).abs().max() / want.abs().max())
        worst = max(worst, error)
        if not error <= limit:
            errors.append(f"step {i}: off by {error:.1e} of the largest value, allowed {limit:.0e}")
    errors += [f"store: {part} differs" for part in rigs[0].differences(rigs[1])]
    return {"format": name, "dtype": dtype_name, "step_error": worst, "errors": errors}


class _Rig:
    """A backend with a store of its own, and shuffled blocks."""

    def __init__(
        self,
        backend: AttentionBackend,
        formats: tuple[KVFormat, KVFormat],
        layer: LayerShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.backend, self.device = backend, device
        quantizer = _Fixed(*formats).on(layer, dtype, device)
        longest = max(sum(counts[r] for counts in STEPS) for r in range(REQUESTS))
        M = -(-longest // B)
        self.store = KVStore(
            [layer], [quantizer.formats(0)], 1 + REQUESTS * M, B, device, poison=True, slots=REQUESTS, raw_dtype=dtype
        )
        self.tables = 1 + torch.randperm(REQUESTS * M, generator=torch.Generator().manual_seed(4)).view(REQUESTS, M).int()
        backend.bind(self.store, quantizer, [layer], "cache", False)

    def step(self, rows: list[torch.Tensor], counts: list[int], done: list[int]) -> torch.Tensor:
        starts = [sum(counts[:r]) for r in range(len(counts) + 1)]
        positions = torch.cat([torch.arange(n - c, n) for n, c in zip(done, counts, strict=True)])
        request = torch.arange(REQUESTS).repeat_interleave(torch.tensor(counts))
        slots = self.tables[request, positions // B].long() * B + positions % B
        own = torch.arange(REQUESTS, device=self.device)
        meta = AttentionMetadata(
            block_table=self.tables.to(self.device),
            seq_lens=torch.tensor(done, dtype=torch.int32, device=self.device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=self.device),
            slots=slots.to(self.device),
            positions=positions.to(self.device),
            seq_lens_list=done,
            query_start_list=starts,
            num_decodes=REQUESTS if set(counts) == {1} else 0,
            block_size=B,
            tail_slots=own,
            sink_slots=own.flip(0),
        )
        q, k, v = (x.to(self.device) for x in rows)
        return self.backend.attend(0, q, k, v, meta).double().cpu()

    def differences(self, other: "_Rig") -> list[str]:
        mine, theirs = self.store.planes(0)[0], other.store.planes(0)[0]
        planes = {
            f"{side}.{name}": (getattr(mine.of(side), name), getattr(theirs.of(side), name))
            for side in SIDES
            for name in ("codes", "scale", "zero", "tail", "sink")
        }
        return [
            name
            for name, (a, b) in planes.items()
            if a is not None and not torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        ]
