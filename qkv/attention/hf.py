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
    if torch.compiler.is_compiling():
        return opaque_attend(query[0], key[0], value[0], kwargs.get("s_aux"), module.layer_idx)[None], None
    context = current_context()
    if isinstance(context, Probe):
        return context.record(module, query, key, value, attention_mask, kwargs), None
    if not isinstance(context, StepContext):
        raise ModelError("this model's attention belongs to a qkv Engine; close() the engine before using the model elsewhere")
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return context.attend(layer, q, k, v, kwargs.get("s_aux"))[None], None


@torch.library.custom_op("qkv::attend", mutates_args=())
def opaque_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink_logits: torch.Tensor | None, layer: int
) -> torch.Tensor:
    """What a compiled model calls instead of all that: q [Hq, T, Dk], k [H, T, Dk], v [H, T, Dv] -> [T, Hq, Dv]. One operator,
    which stores and attends through the context of the step that runs it; the compiler does not look inside."""
    context = current_context()
    assert isinstance(context, StepContext), "a compiled model ran outside its engine"
    return context.attend(layer, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), sink_logits).contiguous()


@opaque_attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink_logits: torch.Tensor | None, layer: int) -> torch.Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v.shape[2])


class _Attachment:
    """How many adapters hold a model, and the attention implementations to give back when the last one lets go."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.adapters = 0
        self.compiled: Any = None  # the model under torch.compile, shared by the adapters that want it
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
    attention a paged cache cannot stand in for. fused: use fused.py where it can. compile: torch.compile where it cannot.
    min_rows: a forward needs that many, padding included; torch.compile would specialise on a single one.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        fused: bool = True,
        compile: bool = False,
    ) -> None:
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
            self._compiled: Any = None
            self._fused = self._shared_fused() if fused else "runner.fused is false"
            if compile and not isinstance(self._fused, FusedForward):
                self._compiled = self._shared_compiled()
            self.min_rows = 1 if isinstance(self._fused, FusedForward) else 2
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
        run, wanted = self.model if self._compiled is None else self._compiled, len(logits_index)
        if self._compiled is not None:  # at least 2, and always a tensor made in inference mode: either would compile anew
            logits_index = torch.cat([logits_index, logits_index.new_zeros(max(0, 2 - wanted))])
        extra = {"logits_to_keep": logits_index} if self._keeps_logits else {}
        with step_context(context):
            out = run(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **extra)
        logits: torch.Tensor = out.logits[0]
        return (logits if self._keeps_logits else logits[logits_index])[:wanted]

    def _shared_fused(self) -> FusedForward | str:
        """The fused forward of the model, built and tried by its first adapter; or the reason why it has none."""
        attachment = _attached[self.model]
        if attachment.fused is None:
            try:
                attachment.fused = fuse(self.model, self.layers, self._transformers_forward)
            except NotRecognised as reason:
                attachment.fused = str(reason)
        return attachment.fused

    def _shared_compiled(self) -> Any:
        """The model under torch.compile, for any number of rows. Compiled by its first forward."""
        attachment = _attached[self.model]
        if attachment.compiled is None:
            attachment.compiled = torch.compile(self.model, dynamic=True)
        return attachment.compiled

    @property
    def forward_path(self) -> str:
        """Whose forward runs: "fused", or "transformers" or "compiled" with the reason. Goes into every record."""
        if isinstance(self._fused, FusedForward):
            return "fused"
        return f"{'transformers' if self._compiled is None else 'compiled'}: {self._fused}"

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
