"""Tiny random models, one per architecture, for tests of anything that runs a model.

`tiny_model(name)` builds one in well under a second: seeded, float32, eval mode, vocabulary VOCAB, 512 positions unless the
architecture says otherwise, windows of WINDOW tokens where the family has them, weights drawn with a standard deviation
that keeps greedy output from collapsing into one token.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# name -> (model type of transformers, what differs from _COMMON; None removes a key)
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2_sliding": ("qwen2", {"head_dim": None, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "gemma2": (
        "gemma2",
        {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
    ),
    "gemma3_text": ("gemma3_text", {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 24}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    "olmo2": ("olmo2", {"head_dim": None}),
    "gpt_neox": ("gpt_neox", {"head_dim": None, "num_key_value_heads": None}),
    "gpt2": (
        "gpt2",
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "scale_attn_by_inverse_layer_idx": True,  # a softmax scale per layer
        },
    ),
    "opt": (
        "opt",
        {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 96, "word_embed_proj_dim": 64},
    ),
    "granite": ("granite", {"head_dim": None, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "logit_scale": 1.0}),
    "starcoder2": ("starcoder2", {"head_dim": None, "sliding_window": WINDOW}),
    "qwen2_moe": ("qwen2_moe", {"head_dim": None, "num_experts": 4, "shared_expert_intermediate_size": 32, **_MOE}),
}

ARCHITECTURES = tuple(_ARCHITECTURES)


def tiny_model(name: str, seed: int = 0, **overrides: Any) -> Any:  # a PreTrainedModel: its methods are typed for its authors
    """The tiny model called `name` (one of ARCHITECTURES); `overrides` go into its config."""
    kind, differences = _ARCHITECTURES[name]
    return random_model(kind, seed, **(_COMMON | differences | overrides))


def random_model(kind: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model of any transformers model type from `config`. One-dimensional parameters are jittered too, since most start
    at 0 or 1 and would hide a mistake in how they are applied (biases, norms, attention sinks)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{k: v for k, v in config.items() if v is not None}), dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return model
