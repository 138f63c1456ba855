"""The transformers adapter: a Hugging Face causal LM whose attention layers call a backend of ours.

Takes: a PreTrainedModel. Gives: the shapes of its attention layers, and logits of packed variable-length batches.
Does not know about: requests, blocks, quantizers. Never patches a model's code; transformers is imported on first use.

How: one attention function is registered with transformers as "qkv" and the model is switched to it. It is not registered
as a mask builder, so transformers builds no masks; what a row may see comes from the step's AttentionMetadata. On the CPU, a
model that fused.py recognises runs through its fused forward instead of transformers' code.
"""

import inspect
import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from qkv.attention.base import StepContext, current_context, step_context
from qkv.attention.fused import FusedForward, NotRecognised, fuse
from qkv.attention.probe import Probe, check_config, probe_layers
from qkv.errors import ModelError
from qkv.layout import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NAME = "qkv"  # of our attention function within transformers


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: query [1, Hq, T, Dk], key [1, H, T, Dk], value [1, H, T, Dv], after RoPE.

    Returns [1, T, Hq, Dv]. Scale, window and softcap were read once, when the model was probed, and are bound to the backend.
    """
    context = current_context()
    if isinstance(context, Probe):
        return context.record(module, query, key, value, attention_mask, kwargs), None
    if not isinstance(context, StepContext):
        raise ModelError("this model's attention belongs to a qkv Engine; close() the engine before using the model elsewhere")
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return context.attend(layer, q, k, v, kwargs.get("s_aux"))[None], None


class _Attachment:
    """How many adapters hold a model, and the attention implementations to give back when the last one lets go."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.adapters = 0
        self.fused: FusedForward | str | None = None  # the model's fused forward, or why it has none; None: not tried yet
        configs = [model.config] + [m.config for m in model.modules() if hasattr(m, "config")]
        configs += [
            getattr(c, name) for c in configs for name in getattr(c, "sub_configs", {}) if getattr(c, name, None) is not None
        ]
        unique = {id(c): c for c in configs if hasattr(c, "_attn_implementation")}
        self.originals = [(c, c._attn_implementation) for c in unique.values()]

    def restore(self) -> None:
        for config, implementation in self.originals:  # outer first: setting an outer one also sets those inside it
            config._attn_implementation = implementation


_attached: "WeakKeyDictionary[PreTrainedModel, _Attachment]" = WeakKeyDictionary()


class HFAdapter:
    """A model attached to our attention. Several adapters may share one model; the last close() restores it.

    layers: its attention layers, by layer index. Raises ModelError, leaving the model as it was, for architectures whose
    attention a paged cache cannot stand in for. fused: use fused.py where it can.
    """

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None, fused: bool = True) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._closed = False
        accepted = inspect.signature(type(model).forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        check_config(model)
        if "position_ids" not in accepted:
            raise ModelError(f"{type(model).__name__} takes no position_ids, so sequences cannot be packed into one batch")
        _attach(model)
        try:
            if self._config._attn_implementation != NAME:
                raise ModelError(
                    f"{type(model).__name__} does not call attention through transformers' AttentionInterface, so its keys and "
                    "values cannot be paged (it would silently run its own attention)"
                )
            self.layers: list[LayerShape] = probe_layers(model, self.vocab_size)
            self._fused = self._shared_fused() if fused else "runner.fused is false"
        except BaseException:
            self.close()
            raise

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        """One forward of a packed batch: input_ids [T] int64, positions [T] int64, logits_index [n] int64 (rows whose logits
        are wanted, n may be 0). Returns [n, V] in the dtype of the model's output head. Raises ModelError after close()."""
        if self._closed:
            raise ModelError("this adapter is closed; create a new engine")
        before = context.calls
        forward = self._fused.forward if isinstance(self._fused, FusedForward) else self._transformers_forward
        with torch.inference_mode():
            logits = forward(input_ids, positions, logits_index, context)
        if context.calls - before != len(self.layers):
            raise ModelError(
                f"{context.calls - before} of {len(self.layers)} attention layers reached the paged cache; something changed the "
                "model's attention implementation while the engine was open"
            )
        return logits

    def _transformers_forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        extra = {"logits_to_keep": logits_index} if self._keeps_logits else {}
        with step_context(context):
            out = self.model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **extra)
        logits: torch.Tensor = out.logits[0]
        return logits if self._keeps_logits else logits[logits_index]

    def _shared_fused(self) -> FusedForward | str:
        """The fused forward of the model, built and tried by its first adapter; or the reason why it has none."""
        attachment = _attached[self.model]
        if attachment.fused is None:
            try:
                attachment.fused = fuse(self.model, self.layers, self._transformers_forward)
            except NotRecognised as reason:
                attachment.fused = str(reason)
        return attachment.fused

    @property
    def forward_path(self) -> str:
        """Whose forward runs: "fused", or "transformers" with the reason. Goes into every record."""
        return "fused" if isinstance(self._fused, FusedForward) else f"transformers: {self._fused}"

    def close(self) -> None:
        """Let go of the model; the last adapter gives it its own attention back. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            _detach(self.model)

    @property
    def vocab_size(self) -> int:
        """Usable token ids: rows of the input embedding (a tokenizer may have fewer)."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]

    @property
    def max_positions(self) -> int | None:
        """Tokens of one sequence at most; None if the config states no limit.

        With longrope the frequencies switch for a whole batch once its longest sequence passes the original length, so that
        one request would change another's keys: the original length is the limit then.
        """
        config = self._config
        limits = [getattr(config, "max_position_embeddings", None)]
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            limits += [rope.get("original_max_position_embeddings"), getattr(config, "original_max_position_embeddings", None)]
        return min((int(n) for n in limits if n), default=None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text: those of the generation config, as in generate(); else the config's; else the tokenizer's."""
        for source in (getattr(self.model, "generation_config", None), self._config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config()


def _attach(model: "PreTrainedModel") -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_function)  # idempotent
    attachment = _attached.get(model)
    if attachment is None:
        attachment = _attached[model] = _Attachment(model)
        model.set_attn_implementation(NAME)
    attachment.adapters += 1


def _detach(model: "PreTrainedModel") -> None:
    attachment = _attached[model]
    attachment.adapters -= 1
    if attachment.adapters == 0:
        del _attached[model]
        attachment.restore()
