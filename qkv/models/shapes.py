"""Named shapes: models with random weights, for speed, planning and tests where no checkpoint is at hand.

Takes: a shape's name. Gives: its numbers, or a model built from them.
Does not know about: files, tokenizers.
"""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from qkv.cache.sizing import free_memory
from qkv.errors import ConfigError, ModelError
from qkv.validate import suggest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions. window: of the sliding layers (in gemma3 some, else all). qkv_bias: Q, K and V have biases."""

    family: Literal["llama", "mistral", "qwen2", "gemma3_text"]
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float = 1e-5
    window: int | None = None
    qkv_bias: bool = False
    tied: bool = False
    init_std: float = 0.02

    @property
    def parameters(self) -> int:
        """Weights in total, counted as the transformers model of the family has them."""
        q, kv = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv) + (q + 2 * kv if self.qkv_bias else 0)
        norms = 2 * self.hidden
        if self.family == "gemma3_text":
            norms = 4 * self.hidden + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.mlp + norms
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.layers * layer + self.hidden


_FULL = {
    "llama2-7b": Shape("llama", 32, 32, 32, 128, 4096, 11008, 32000, 4096, 1e4),
    "llama3-8b": Shape("llama", 32, 32, 8, 128, 4096, 14336, 128256, 8192, 5e5),
    "mistral-7b": Shape("mistral", 32, 32, 8, 128, 4096, 14336, 32000, 32768, 1e4, window=4096),
    "qwen2.5-7b": Shape("qwen2", 28, 28, 4, 128, 3584, 18944, 152064, 32768, 1e6, norm_eps=1e-6, qkv_bias=True),
}


def _tiny(full: Shape, query_heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> Shape:
    hidden = query_heads * head_dim
    return replace(
        full,
        layers=3,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        mlp=2 * hidden,
        vocab=512,
        max_positions=2048,
        window=window,
        init_std=0.1,  # at 0.02 so few layers leave the logits nearly flat
    )


# Random weights: name -> shape. Tiny ones keep the ratio of heads and the family's peculiarities.
RANDOM_SHAPES: dict[str, Shape] = _FULL | {
    "llama2-7b-tiny": _tiny(_FULL["llama2-7b"], 4, 4, 32),
    "llama3-8b-tiny": _tiny(_FULL["llama3-8b"], 8, 2, 16),
    "mistral-7b-tiny": _tiny(_FULL["mistral-7b"], 8, 2, 16, window=64),
    "qwen2.5-7b-tiny": _tiny(_FULL["qwen2.5-7b"], 14, 2, 16),
}

# Checkpoints that ship in packages: name -> shape, so that planners need not load them.
_PACKAGED = {
    "smollm2": Shape("llama", 30, 9, 3, 64, 576, 1536, 49152, 8192, 1e5, tied=True),
    "gemma3": Shape("gemma3_text", 18, 4, 1, 256, 640, 2048, 262144, 32768, 1e6, norm_eps=1e-6, window=512, tied=True),
}


def shape_of(name: str) -> dict[str, Any]:
    """Dimensions of a known model without building it: layers, kv_heads, query_heads, head_dim, vocab, parameters, and the
    other fields of Shape. Raises ConfigError with a did-you-mean."""
    known = RANDOM_SHAPES | _PACKAGED
    if name not in known:
        raise ConfigError(f"no shape is known for model '{name}'; {suggest(name, known)}")
    return asdict(known[name]) | {"parameters": known[name].parameters}


def build_random(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> "PreTrainedModel":
    """A model of a named shape with seeded random weights. Raises ModelError, with the arithmetic, if it does not fit."""
    from transformers import AutoModelForCausalLM

    shape = RANDOM_SHAPES[name]
    need, free = shape.parameters * dtype.itemsize, free_memory(device)
    if need > free:
        raise ModelError(
            f"{name} does not fit: {shape.parameters:,} parameters x {dtype.itemsize} bytes = {need / 2**30:.1f} GiB, and "
            f"{device} has {free / 2**30:.1f} GiB free. Use {name.removesuffix('-tiny')}-tiny, a smaller dtype or another device"
        )
    # A tiny model is drawn in float32 whatever its dtype, so that its weights are the same numbers in every dtype.
    draw = torch.float32 if name.endswith("-tiny") else dtype
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(shape), dtype=draw)
        if shape.family == "qwen2":
            _add_key_bias(model, shape)
    return model.to(dtype)


def _config(shape: Shape) -> Any:
    from transformers import AutoConfig

    extra: dict[str, Any] = {}
    if shape.family == "mistral":
        extra["sliding_window"] = shape.window
    return AutoConfig.for_model(
        shape.family,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        initializer_range=shape.init_std,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )


@torch.no_grad()
def _add_key_bias(model: "PreTrainedModel", shape: Shape) -> None:
    """Give Qwen2.5 its large K biases: they make K channels outliers, which is what this family tests in a quantizer.

    The largest sit in the slowest-rotating RoPE pair, where a constant survives the rotation.
    """
    half = shape.head_dim // 2
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            bias = torch.randn_like(parameter).view(shape.kv_heads, shape.head_dim)
            bias[:, half - 1 :: half] *= 20
            parameter.copy_(bias.view(-1))
