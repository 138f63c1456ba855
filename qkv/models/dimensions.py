"""The dimensions of a model, without its weights: what planning and simulation need.

Takes: ModelConfig. Gives: Dimensions. A named shape costs nothing; a hub id or a file reads a configuration, never tensors.
Does not know about: the cache, devices.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkv.config import ModelConfig
from qkv.errors import ModelError
from qkv.layout import LayerShape
from qkv.models.fingerprint import setting
from qkv.models.hub import unreachable
from qkv.models.loader import Place, resolve, why
from qkv.models.shapes import shape_of


@dataclass(frozen=True)
class Dimensions:
    """parameters, vocab, max_positions: None where only the attention's dimensions are known. head_parameters: of the
    output head, which runs on fewer rows than the rest; embedding_parameters: looked up, not multiplied (0 if tied)."""

    name: str
    source: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    parameters: int | None = None
    head_parameters: int = 0
    embedding_parameters: int = 0
    vocab: int | None = None
    max_positions: int | None = None
    window: int | None = None

    def layer_shapes(self, kv_heads: int | None = None) -> list[LayerShape]:
        """One LayerShape per attention layer. kv_heads: instead of the model's own."""
        H, D = kv_heads or self.kv_heads, self.head_dim
        return [LayerShape(i, H, self.query_heads, D, D, D**-0.5, self.window) for i in range(self.layers)]


def dimensions(config: ModelConfig) -> Dimensions:
    """Raises ModelError, one line for people, when the model is unknown or its configuration cannot be read."""
    place = resolve(config)
    if place.kind == "shape":
        layers, kv_heads, head_dim = config.layers or 0, config.kv_heads or 0, config.head_dim or 0  # resolve() refuses None
        heads = config.query_heads or kv_heads
        if heads % kv_heads:
            raise ModelError(f"model.query_heads={heads} is not a multiple of model.kv_heads={kv_heads}")
        sizes = (layers, kv_heads, heads, head_dim, config.parameters)
        return Dimensions("shape", "dimensions", *sizes, vocab=config.vocab, max_positions=config.max_positions)
    if place.kind in ("random", "package"):
        s = shape_of(place.value)
        return Dimensions(
            place.value,
            "named shape",
            layers=s["layers"],
            kv_heads=s["kv_heads"],
            query_heads=s["query_heads"],
            head_dim=s["head_dim"],
            parameters=s["parameters"],
            head_parameters=s["vocab"] * s["hidden"],
            embedding_parameters=0 if s["tied"] else s["vocab"] * s["hidden"],
            vocab=s["vocab"],
            max_positions=s["max_positions"],
            window=s["window"] if s["family"] == "mistral" else None,
        )
    return _from_transformers(place)


def _from_transformers(place: Place) -> Dimensions:
    from transformers import AutoConfig, AutoModelForCausalLM

    local = place.kind != "hub" or unreachable() is not None
    where: dict[str, Any] = {"pretrained_model_name_or_path": place.value, "local_files_only": local}
    if place.kind == "gguf":
        file = Path(place.value)
        where |= {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**where, trust_remote_code=False).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # hub, configuration and file errors share no base class
        raise ModelError(why(place, error, "read the configuration of")) from error
    heads, kv_heads, head_dim = (_one(config, place, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    return Dimensions(
        place.value,
        f"configuration ({place.kind})",
        config.num_hidden_layers,
        kv_heads or heads,
        heads,
        head_dim or config.hidden_size // heads,
        sum(p.numel() for p in model.parameters()),
        head_parameters=config.vocab_size * config.hidden_size,
        embedding_parameters=0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size,
        vocab=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def _one(config: Any, place: Place, name: str) -> Any:
    """A setting that all layers have alike. Raises ModelError."""
    value = setting(config, name)
    if isinstance(value, list):
        raise ModelError(
            f"the layers of model '{place.value}' have different {name} ({', '.join(map(str, dict.fromkeys(value)))}): a plan "
            "or a simulation takes one for all. The model itself can be served"
        )
    return value
