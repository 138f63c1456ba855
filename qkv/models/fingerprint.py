"""The identity of a model's weights, cheap enough to take at every load.

Takes: a transformers model. Gives: a short hex string that scale files and prefix caches are tied to.
Does not know about: where the model came from.
"""

import json
from typing import TYPE_CHECKING, Any

import torch
import xxhash

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLES = 1024  # elements read per parameter

# What changes keys and values without changing a weight. Settings that only some versions of transformers write (dtype,
# version, paths) must not enter: the same weights have to agree whichever way they were loaded.
_CONFIG_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "vocab_size",
    "sliding_window",
    "layer_types",
    "rope_parameters",
)


def setting(config: Any, name: str) -> Any:
    """A value of a configuration, None if it has none; a list by layer where the layers have different ones (gemma4)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers will not give one value for all
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def fingerprint(model: "PreTrainedModel") -> str:
    """xxh3_128 (32 hex digits) over the config's shape and, of every parameter, name, shape and <= SAMPLES strided elements.

    Elements are compared as bfloat16, so that a float32 and a bfloat16 load of the same weights agree. (A float16 load
    rounds twice and may not.) Detects another model or other weights; it is not a checksum of every byte.
    """
    config = model.config.get_text_config()
    digest = xxhash.xxh3_128()
    digest.update(json.dumps([setting(config, name) for name in _CONFIG_FIELDS], sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":  # no weights: the adapter refuses it, with the reason
            continue
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // SAMPLES))].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
