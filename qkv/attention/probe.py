"""Finding out what attention a model has, by running it once; and refusing what a paged cache cannot stand in for.

Takes: a model attached to our attention function. Gives: one LayerShape per layer.
Does not know about: how the adapter attaches, backends.
"""

from typing import TYPE_CHECKING, Any

import torch

from qkv.attention.base import step_context
from qkv.errors import ModelError
from qkv.layout import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Arguments that transformers models pass to attention and that this project honours or that change nothing in inference.
# Anything else that is set (position_bias, ALiBi slopes, sparse block indices ...) would be ignored silently: refused.
_HONOURED = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
_HARMLESS = {
    "dropout",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "deterministic",
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ROWS = 4


class Probe:
    """The context of the probing forward: records what every layer's attention is called with, and answers zeros."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = type(model).__name__
        self.config: Any = model.config.get_text_config()
        self.shapes: dict[int, LayerShape] = {}

    def record(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """q [1, Hq, T, Dk], k [1, H, T, Dk], v [1, H, T, Dv] -> zeros [1, T, Hq, Dv]. Raises ModelError."""
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise self._refusal("an attention layer has no layer_idx")
        if index in self.shapes:
            raise self._refusal(f"layer {index} calls attention more than once")
        if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
            raise self._refusal(f"layer {index} is bidirectional: a cached token would have to see later ones")
        if mask is not None:
            raise self._refusal(f"layer {index} builds its own attention mask")
        unknown = sorted(n for n, x in kwargs.items() if x is not None and x is not False and n not in _HONOURED | _HARMLESS)
        if unknown:
            raise self._refusal(f"layer {index} passes {', '.join(unknown)} to attention, which the paged cache does not apply")
        Hq, H = q.shape[1], k.shape[1]
        if k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2] or Hq % H:
            raise self._refusal(f"layer {index} attends to something else than its own tokens: q {[*q.shape]}, k {[*k.shape]}")
        window = kwargs.get("sliding_window") or None
        if window is None and self._slides(index):
            raise self._refusal(f"layer {index} has a sliding window by its config but does not pass it to attention")
        if not all(_rows_agree(x) for x in (q, k, v)):
            raise self._refusal(
                f"layer {index} gives one token at one position different keys or values depending on its neighbours in the "
                "batch: the model mixes tokens outside attention (convolution, recurrence) or numbers positions itself"
            )
        settings = (kwargs.get(name) for name in ("s_aux", "scaling", "sliding_window", "softcap"))
        self.shapes[index] = layer_shape(index, q[0], k[0], v[0], *settings)
        return q.new_zeros(1, q.shape[2], Hq, v.shape[3])

    def layers(self) -> list[LayerShape]:
        """All layers, by index. Raises ModelError unless each of the config's layers was called."""
        expected = self.config.num_hidden_layers
        if sorted(self.shapes) != list(range(expected)):
            raise self._refusal(
                f"{len(self.shapes)} of its {expected} layers call attention through transformers' AttentionInterface; the "
                "others would run their own"
            )
        return [self.shapes[i] for i in range(expected)]

    def _slides(self, index: int) -> bool:
        types = getattr(self.config, "layer_types", None)
        if types:
            return bool(types[index] == "sliding_attention")
        return bool(getattr(self.config, "sliding_window", None)) and getattr(self.config, "use_sliding_window", True)

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"{self.model} cannot run on the paged cache: {reason}")


def layer_shape(
    index: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s_aux: torch.Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> LayerShape:
    """What transformers calls attention with, as a LayerShape: q [Hq, T, Dk], k [H, T, Dk], v [H, T, Dv]."""
    return LayerShape(
        index=index,
        H=k.shape[0],
        Hq=q.shape[0],
        Dk=q.shape[2],
        Dv=v.shape[2],
        scaling=q.shape[2] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=None if softcap is None else float(softcap),
        sink_logits=s_aux is not None,
    )


def check_weights(model: "PreTrainedModel") -> None:
    """Refuse a model whose weights are not all at hand, on one device. Raises ModelError."""
    name, tensors = type(model).__name__, [*model.named_parameters(), *model.named_buffers()]
    absent = next((n for n, t in tensors if t.device.type == "meta"), None)
    if absent:
        raise ModelError(
            f"{name} has no weights in memory for {absent} (device 'meta'): they were offloaded, or never loaded. Load the model "
            "whole, without device_map, onto one device"
        )
    devices = sorted({str(t.device) for _, t in tensors})
    if len(devices) > 1:
        raise ModelError(
            f"{name} is spread over {', '.join(devices)}; the cache is on one device, so move the whole model to one"
        )


def check_config(model: "PreTrainedModel") -> None:
    """Refuse what the config already rules out. Raises ModelError with the reason."""
    config: Any = model.config.get_text_config()
    reason = None
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif getattr(config, "num_kv_shared_layers", 0):
        reason = f"its last {config.num_kv_shared_layers} layers share the keys and values of earlier ones (num_kv_shared_layers)"
    elif odd := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES):
        reason = f"it has layers of type {', '.join(map(str, odd))}; only {' and '.join(sorted(_LAYER_TYPES))} are served"
    elif not hasattr(config, "num_hidden_layers"):
        reason = "its config has no num_hidden_layers"
    if reason:
        raise ModelError(f"{type(model).__name__} cannot run on the paged cache: {reason}")


def probe_layers(model: "PreTrainedModel", vocab_size: int) -> list[LayerShape]:
    """Run `_ROWS` copies of one token at one position through the model. Raises ModelError with the reason for a refusal.

    Attention answers zeros, so rows do not meet there: if they differ anyway, packing sequences into a batch would be wrong.
    """
    probe = Probe(model)
    ids = torch.full((1, _ROWS), vocab_size // 2, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode(), step_context(probe):
            out = model(input_ids=ids, position_ids=torch.full_like(ids, 3), use_cache=False, return_dict=True)
    except ModelError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ModelError(f"{type(model).__name__} cannot run on the paged cache: a trial forward failed ({first})") from error
    logits = getattr(out, "logits", None)
    shape = None if logits is None else tuple(logits.shape)
    if shape is None or shape[:-1] != (1, _ROWS):
        raise ModelError(
            f"{type(model).__name__} has no language model head: for {_ROWS} tokens it gives "
            f"{'no logits' if shape is None else f'logits of shape {shape}'}. Load the model with AutoModelForCausalLM"
        )
    if shape[-1] != vocab_size:
        raise ModelError(
            f"{type(model).__name__} gives logits over {shape[-1]} classes, and its input embedding has {vocab_size} tokens: its "
            "head is not that of a language model, or only one of the two was resized"
        )
    return probe.layers()


def _rows_agree(x: torch.Tensor) -> bool:
    """Whether the rows of x [1, H, T, D] are the same up to rounding."""
    x = x.float()
    spread = (x - x[:, :, :1]).abs().max()
    return bool(spread <= 0.02 * x.abs().max()) or not bool(x.isfinite().all())
