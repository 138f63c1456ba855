"""Shared by engine tests: engines on a tiny model, scales for it, and what is stored for a request."""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from qkv.engine import Engine
from qkv.layout import SIDES
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv.types import Request
from tests.engine.tiny_models import VOCAB, tiny_model
from tests.kernels.paged import bound, shape

STATISTICS = ("k_channel_absmax", "k_channel_min", "k_channel_max", "k_head_absmax", "v_head_absmax")


@lru_cache
def _model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return tiny_model(name).to(dtype)


def model(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model; the same object for the same arguments."""
    return _model(name, dtype)


def tokens(seed: int, n: int) -> list[int]:
    """n token ids above the special ones."""
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def scales(quantizer: str | dict[str, Any], name: str = "llama") -> ScaleFile | None:
    """Scales of the tiny model for a quantizer that needs them, from random text; None for the others."""
    return _scales(json.dumps(quantizer), name)


@lru_cache
def _scales(quantizer: str, name: str) -> ScaleFile | None:
    from calibration.fitting.collect import absmax_scales

    built = QUANTIZERS.build(json.loads(quantizer))
    if not built.needs_scales:
        return None
    with Engine.create(model(name), num_blocks=64) as engine:
        return absmax_scales(engine, [tokens(99, 200)], built)


def make(quantizer: str | dict[str, Any] = "none", block_size: int = 16, **kw: Any) -> Engine:
    """An engine on the tiny model, free pages poisoned, with scales where the quantizer needs them."""
    name = kw.pop("model_name", "llama")
    defaults: dict[str, Any] = {
        "quantizer": quantizer,
        "allocator": {"name": "paged", "block_size": block_size},
        "scales": scales(quantizer, name),
        "num_blocks": 128,
        "host_memory_bytes": "4MiB",  # check() looks at every host block
        "watermark": 0.0,
        "poison": True,
        "max_num_seqs": 8,
    }
    return Engine.create(model(name, kw.pop("dtype_", torch.float32)), **(defaults | kw))


def block_unit(quantizer: str) -> bool:
    """Whether some format of the quantizer encodes whole blocks, so that what is stored depends on the block size."""
    formats = bound(quantizer, [shape(Dk=16)]).formats(0)
    return any(fmt.unit == "block" for part in formats for fmt in (part.k, part.v))


def pieces(engine: Engine, request: Request, layers: Iterable[int]) -> list[bytes]:
    """What is stored for the request, piece by piece, each final once written: the codes and scales of every computed token,
    or of every full block for block-unit formats, whose open block comes last, as the raw rows that it is."""
    B, n = engine.scheduler.manager.block_size, request.num_computed
    tokens = torch.arange(n)
    table = torch.tensor(request.blocks, dtype=torch.int64)
    full, open_rows = n // B, torch.arange(n // B * B, n)
    out = []
    for layer in layers:
        for p in engine._parts.store.planes(layer):
            for plane in map(p.of, SIDES):
                for pool in plane.pool:
                    if plane.fmt.unit == "block":
                        out += list(pool[table[:full]])
                    else:
                        out += list(pool[table[tokens // B], :, tokens % B])
                if plane.sink is not None:
                    out.append(plane.sink[request.sink_slot][:, : min(n, plane.fmt.sink_tokens)])
                if plane.tail is not None:
                    out.append(plane.tail[request.tail_slot][:, open_rows % plane.tail.shape[2]])
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in out]


def stored(engine: Engine, request: Request) -> bytes:
    """All codes, scales and raw rows of the request's computed tokens over all layers: independent of block ids."""
    return b"".join(pieces(engine, request, range(len(engine.layers))))


def keep_stored(engine: Engine) -> dict[int, bytes]:
    """A dictionary that receives what is stored for each request when it ends, before its blocks are released."""
    seen: dict[int, bytes] = {}
    finish = engine.scheduler.finish

    def keep(request: Request, reason: Any) -> None:
        if request.blocks:
            seen[request.id] = stored(engine, request)
        finish(request, reason)

    engine.scheduler.finish = keep  # type: ignore[method-assign]
    return seen
