"""The frame around attention, fused: a llama-like decoder as seven C++ calls a layer instead of some forty torch operators.

Takes: a transformers model on the CPU. Gives: the same forward, or the reason why this model keeps transformers' own.
Does not know about: how the model is attached, backends. Weights are read where the model keeps them: nothing is kept in
another layout or patched, so a model costs no more memory, several engines share it, and there is nothing to restore. What was
read is of the model at that moment: who uses it watches the model, and makes a new one when something changed.

A model is recognised by the shape of its modules, by every one of its parameters having a place here, and finally by a trial:
both forwards run a few tokens through a stand-in for attention and must agree.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qkv.attention.base import StepContext
from qkv.attention.watch import is_known
from qkv.layout import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # relative error of logits at most, against transformers in that dtype


class NotRecognised(Exception):
    """Why a model keeps transformers' own forward."""


@dataclass(frozen=True)
class Layer:
    """The parameters of one decoder layer. Lists are applied to the same rows; bias lists are empty or as long."""

    before_attention: torch.Tensor
    qkv: list[torch.Tensor]
    qkv_bias: list[torch.Tensor]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: list[torch.Tensor]
    out_bias: list[torch.Tensor]
    after_attention: torch.Tensor | None  # norms of what is added to the residual (gemma)
    before_mlp: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: list[torch.Tensor]
    down_bias: list[torch.Tensor]
    after_mlp: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        values = [x for v in vars(self).values() for x in (v if isinstance(v, list) else [v])]
        return [x for x in values if x is not None]


class FusedForward:
    """The fused forward of one model. Raises NotRecognised. layers: as probed; shared between engines, holds no state."""

    def __init__(self, model: "PreTrainedModel", layers: list[LayerShape]) -> None:
        from qkv_kernels.cpu import BuildError, instruction_set
        from qkv_kernels.cpu.frame import ACTIVATIONS, load_frame

        if model.device.type != "cpu" or model.dtype not in _DTYPES:
            raise NotRecognised(
                f"the fused forward runs float32 and bfloat16 on the CPU, this is {model.dtype} on {model.device.type}"
            )
        config: Any = model.config.get_text_config()
        foreign = next((f"{n} is a {type(m).__name__}" for n, m in model.named_modules() if not is_known(type(m))), None)
        if foreign:
            raise NotRecognised(f"{foreign}, which is neither torch's nor transformers'")
        try:
            base: Any = model.model
            self._embed, self._rotary, head = base.embed_tokens, base.rotary_emb, model.lm_head
            self._layers = [_layer(m) for m in base.layers]
            self._activation = ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act]
            self._norm, self._head, self._head_bias = base.norm.weight, [_weight(head)], _bias(head)
            norm = base.norm
            self._eps = float(getattr(norm, "variance_epsilon", None) or norm.eps)
            with torch.no_grad():
                self._offset = float((norm(torch.ones_like(norm.weight)) - norm.weight).mean().round())  # gemma: weight + 1
        except (AttributeError, KeyError, TypeError) as error:
            raise NotRecognised(f"its modules are not those of a llama-like decoder ({error})") from None
        self._shapes, self.vocab_size = layers, int(self._embed.weight.shape[0])
        if any(s.Dk != s.Dv or s.sink_logits for s in layers):
            raise NotRecognised("its attention has sink logits, or values of another size than its keys")
        known = {t.untyped_storage().data_ptr() for x in self._layers for t in x.tensors()}
        known |= {t.untyped_storage().data_ptr() for t in (self._norm, *self._head, *self._head_bias)}
        known |= {p.untyped_storage().data_ptr() for p in self._embed.parameters()}
        odd = [name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() not in known]
        if odd:
            raise NotRecognised(f"it has parameters without a place in a llama-like decoder ({odd[0]})")
        self._residual = float(getattr(base.layers[0], "residual_multiplier", 1.0))  # these three: granite
        self._embed_scale = float(getattr(base, "embedding_multiplier", 1.0))
        self._logits_scale = 1.0 / float(getattr(config, "logits_scaling", 1.0))
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._rope_types: list[str] = []
        if "layer_type" in inspect.signature(self._rotary.forward).parameters:
            self._rope_types = list(config.layer_types)
        try:
            load_frame()
        except BuildError as error:
            raise NotRecognised(str(error)) from None
        self._isa = instruction_set()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        """As HFAdapter.forward. After the last attention only the rows whose logits are wanted go on."""
        ops, isa, eps, offset, alike = torch.ops.qkv_cpu, self._isa, self._eps, self._offset, context.deterministic
        linear, gated_linear, rms_norm = ops.linear.default, ops.gated_linear.default, ops.rms_norm.default
        add_rms_norm, norm_rope = ops.add_rms_norm.default, ops.norm_rope.default
        x = self._embed(input_ids)
        if self._embed_scale != 1.0:
            x = x * self._embed_scale
        angles = self._angles(x, positions)
        T, last = x.shape[0], len(self._layers) - 1
        h = rms_norm(x, self._layers[0].before_attention, eps, offset, isa)
        for i, (layer, shape) in enumerate(zip(self._layers, self._shapes, strict=True)):
            H, Hq, D = shape.H, shape.Hq, shape.Dk
            qkv = linear(h, layer.qkv, layer.qkv_bias, alike, isa)
            norm_rope(
                qkv, *angles[self._rope_types[i] if self._rope_types else ""], Hq, H, layer.q_norm, layer.k_norm, eps, offset, isa
            )
            q, k, v = qkv.view(T, Hq + 2 * H, D).split_with_sizes((Hq, H, H), 1)
            out = context.attend(i, q, k, v).reshape(T, Hq * D).contiguous()
            if i == last:
                x, out = x[logits_index], out[logits_index]
            y = linear(out, layer.out, layer.out_bias, alike, isa)
            if layer.after_attention is not None:
                y = rms_norm(y, layer.after_attention, eps, offset, isa)
            h = add_rms_norm(x, y, self._residual, layer.before_mlp, eps, offset, isa)
            h = gated_linear(h, layer.gate, layer.up, self._activation, alike, isa)
            y = linear(h, layer.down, layer.down_bias, alike, isa)
            if layer.after_mlp is not None:
                y = rms_norm(y, layer.after_mlp, eps, offset, isa)
            h = add_rms_norm(
                x, y, self._residual, self._norm if i == last else self._layers[i + 1].before_attention, eps, offset, isa
            )
        logits: torch.Tensor = linear(h, self._head, self._head_bias, alike, isa)
        if self._logits_scale != 1.0:
            logits *= self._logits_scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def _angles(self, x: torch.Tensor, positions: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin [T, rotated channels] per kind of layer, once a step, by the model's own rotary embedding."""
        angles = {}
        for kind in dict.fromkeys(self._rope_types) or [""]:
            cos, sin = self._rotary(x[None], positions[None], *([kind] if kind else []))
            angles[kind] = cos[0].contiguous(), sin[0].contiguous()
        return angles


def _layer(layer: Any) -> Layer:
    """Reads one decoder layer. Raises AttributeError where it is not like llama's."""
    a, m = layer.self_attn, layer.mlp
    qkv = [a.qkv_proj] if hasattr(a, "qkv_proj") else [a.q_proj, a.k_proj, a.v_proj]
    if hasattr(m, "gate_up_proj"):
        gate, up = _weight(m.gate_up_proj).detach().chunk(2)
        biases = [m.gate_up_proj.bias]
    else:
        gate, up = _weight(m.gate_proj), _weight(m.up_proj)
        biases = [m.gate_proj.bias, m.up_proj.bias]
    if any(b is not None for b in biases):
        raise AttributeError("its gate projection has a bias")
    four_norms = hasattr(layer, "pre_feedforward_layernorm")  # gemma: post_attention_layernorm is another norm there
    return Layer(
        before_attention=layer.input_layernorm.weight,
        qkv=[_weight(p) for p in qkv],
        qkv_bias=[b for p in qkv for b in _bias(p)],
        q_norm=a.q_norm.weight if hasattr(a, "q_norm") else None,
        k_norm=a.k_norm.weight if hasattr(a, "k_norm") else None,
        out=[_weight(a.o_proj)],
        out_bias=_bias(a.o_proj),
        after_attention=layer.post_attention_layernorm.weight if four_norms else None,
        before_mlp=layer.pre_feedforward_layernorm.weight if four_norms else layer.post_attention_layernorm.weight,
        gate=gate,
        up=up,
        down=[_weight(m.down_proj)],
        down_bias=_bias(m.down_proj),
        after_mlp=layer.post_feedforward_layernorm.weight if four_norms else None,
    )


def _weight(linear: Any) -> torch.Tensor:
    """Of a plain linear layer: others (adapters, parametrizations) compute with more than their weight."""
    if type(linear) is not torch.nn.Linear:
        raise AttributeError(f"a {type(linear).__name__} in place of a Linear")
    weight: torch.Tensor = linear.weight
    return weight


def _bias(linear: Any) -> list[torch.Tensor]:
    return [] if linear.bias is None else [linear.bias]


class _StandIn(StepContext):
    """Attention of the trial: dense, over the rows as one sequence; window and softcap, which are the backend's, left out."""

    def __init__(self, layers: list[LayerShape]) -> None:
        self.layers = layers

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        shape = self.layers[layer]
        k, v = (x.float().repeat_interleave(shape.Hq // shape.H, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * shape.scaling
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v).to(q.dtype)


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepContext], torch.Tensor]


def fuse(model: "PreTrainedModel", layers: list[LayerShape], theirs: Forward) -> FusedForward:
    """The fused forward, tried against `theirs`. Raises NotRecognised, whatever goes wrong."""
    fused = FusedForward(model, layers)
    rows = fused.vocab_size
    ids = torch.tensor([rows // 2, rows // 3, rows // 5, rows // 7, rows // 11])
    call = (ids, torch.tensor([0, 1, 7, 40, 41]), torch.tensor([1, 3, 4]), _StandIn(layers))
    try:
        with torch.inference_mode():
            ours, expected = fused.forward(*call).float(), theirs(*call).float()
    except Exception as error:
        raise NotRecognised(f"its fused forward failed ({str(error).splitlines()[0] if str(error) else error!r})") from error
    difference = float((ours - expected).norm() / expected.norm())
    if not difference <= _DTYPES[model.dtype]:
        raise NotRecognised(f"its fused forward gives other logits (relative difference {difference:.2g})")
    return fused
