"""Operators of the model frame: what a llama-like decoder layer does around attention, on the model's own weights.

Takes: float32 or bfloat16 tensors on the CPU. Gives: torch.ops.qkv_cpu.{linear, gated_linear, rms_norm, add_rms_norm, norm_rope},
documented in frame_ops.cpp. Does not know about: models. With `alike`, a row does not depend on the rows beside it, to the bit.
"""

from functools import lru_cache

import torch

from qkv_kernels.cpu import load

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu": 2}  # transformers' names -> Activation in frame_args.h


@lru_cache
def load_frame() -> None:
    """Build the library if needed, and register what torch.compile needs to know of the operators. Raises BuildError."""
    load()

    @torch.library.register_fake("qkv_cpu::linear")
    def _(x: torch.Tensor, weights: list[torch.Tensor], *_: object) -> torch.Tensor:
        return x.new_empty(x.shape[0], sum(w.shape[0] for w in weights))

    @torch.library.register_fake("qkv_cpu::gated_linear")
    def _(x: torch.Tensor, gate: torch.Tensor, *_: object) -> torch.Tensor:
        return x.new_empty(x.shape[0], gate.shape[0])

    @torch.library.register_fake("qkv_cpu::rms_norm")
    def _(x: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("qkv_cpu::add_rms_norm")
    def _(residual: torch.Tensor, x: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("qkv_cpu::norm_rope")
    def _(qkv: torch.Tensor, *_: object) -> None:
        return None
