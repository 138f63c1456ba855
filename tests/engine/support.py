"""Shared by engine tests: engines on a tiny model, scales for it, and what is stored for a request."""

from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from qkv.engine import Engine
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from qkv.types import Request
from tests.engine.tiny_models import VOCAB, tiny_model

STATISTICS = ("k_channel_absmax", "k_channel_min", "k_channel_max", "k_head_absmax", "v_head_absmax")


@lru_cache
def _model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return tiny_model(name).to(dtype)


def model(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same object for the same arguments."""
    return _model(name, dtype)


def tokens(seed: int, n: int) -> list[int]:
    """n token ids above the special ones."""
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@lru_cache
def scales(quantizer: str, name: str = "llama") -> ScaleFile | None:
    """Scales of the tiny model for a quantizer that needs them, from random text; None for the others."""
    from calibration.collect import calibrate

    if not QUANTIZERS.get(quantizer).needs_scales:
        return None
    with Engine.create(model(name), num_blocks=64) as engine:
        return calibrate(engine, [tokens(99, 200)], QUANTIZERS.build(quantizer))


def make(quantizer: str | dict[str, Any] = "none", block_size: int = 16, **kw: Any) -> Engine:
    """An engine on the tiny model, free pages poisoned, with scales where the quantizer needs them."""
    name = kw.pop("model_name", "llama")
    defaults: dict[str, Any] = {
        "quantizer": quantizer,
        "allocator": {"name": "paged", "block_size": block_size},
        "scales": scales(quantizer if isinstance(quantizer, str) else quantizer["name"], name),
        "num_blocks": 128,
        "watermark": 0.0,
        "poison": True,
        "max_num_seqs": 8,
    }
    return Engine.create(model(name, kw.pop("dtype_", torch.float32)), **(defaults | kw))


def stored(engine: Engine, request: Request) -> bytes:
    """All codes and scales of the request's computed tokens, in token order, over all layers: independent of blocks."""
    B, n = engine.scheduler.manager.block_size, request.num_computed
    position = torch.arange(n)
    blocks = torch.tensor(request.blocks, dtype=torch.int64)[position // B]
    out = []
    for layer in range(len(engine.layers)):
        for planes in engine._parts.store.planes(layer):
            for plane in planes.tensors:
                rows = plane[blocks, :, position % B].contiguous()
                out.append(rows.view(torch.uint8).numpy().tobytes())
    return b"".join(out)


def keep_stored(engine: Engine) -> dict[int, bytes]:
    """Filled with what is stored for each request at the moment it ends, before its blocks go."""
    seen: dict[int, bytes] = {}
    finish = engine.scheduler.finish

    def keep(request: Request, reason: Any) -> None:
        if request.blocks:
            seen[request.id] = stored(engine, request)
        finish(request, reason)

    engine.scheduler.finish = keep  # type: ignore[method-assign]
    return seen
