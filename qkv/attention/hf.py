"""The transformers adapter: a Hugging Face causal LM whose attention layers call a backend of ours.

Takes: a PreTrainedModel. Gives: the shapes of its attention layers, and logits of packed variable-length batches.
Does not know about: requests, blocks, quantizers. Never patches a model's code; transformers is imported on first use.

How: one attention function is registered with transformers as "qkv", and for the time of a forward, and no longer, the model is
switched to it and to eval mode. It is not registered as a mask builder, so transformers builds no masks; what a row may see comes
from the step's AttentionMetadata. On the CPU, a model that fused.py recognises runs through its fused forward instead of
transformers' code.

The model stays its user's. Between two forwards it is as the user left it, and what they change about it is noticed (watch.py).
"""

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qkv.attention.base import StepContext, current_context, step_context
from qkv.attention.borrow import NAME, SharedModel, check_process, share
from qkv.attention.fused import FusedForward, NotRecognised, fuse
from qkv.attention.probe import Probe, check_config, check_weights, layer_shape, probe_layers
from qkv.errors import ModelError
from qkv.layout import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass
class _Call:
    """What attention layers reach during a forward of an adapter: its step's context, and the shapes it was made for."""

    context: StepContext
    layers: list[LayerShape]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, s_aux: torch.Tensor | None, **settings: Any
    ) -> torch.Tensor:
        """q [Hq, T, Dk], k [H, T, Dk], v [H, T, Dv] -> [T, Hq, Dv]. Raises ModelError if the layer is not as it was probed."""
        asked = layer_shape(layer, q, k, v, s_aux, **settings)
        if layer >= len(self.layers) or asked != self.layers[layer]:
            raise ModelError(
                f"attention of layer {layer} changed while the engine was open: it is {asked} now, and was "
                f"{self.layers[layer] if layer < len(self.layers) else 'not there'}. Create a new engine"
            )
        return self.context.attend(layer, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), s_aux)


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: query [1, Hq, T, Dk], key [1, H, T, Dk], value [1, H, T, Dv], after RoPE.

    Returns [1, T, Hq, Dv]. The backend has its scale, window and softcap from the probe; that they still hold is checked.
    """
    settings = (kwargs.get("scaling"), kwargs.get("sliding_window"), kwargs.get("softcap"))
    if torch.compiler.is_compiling():
        return opaque_attend(query[0], key[0], value[0], kwargs.get("s_aux"), module.layer_idx, *settings)[None], None
    call = current_context()
    if isinstance(call, Probe):
        return call.record(module, query, key, value, attention_mask, kwargs), None
    if not isinstance(call, _Call):
        raise ModelError(
            "this model was used while a step of a qkv Engine was running it; use a copy of it, or wait for the step"
        )
    if attention_mask is not None:
        raise ModelError("something passes an attention mask to the model while the engine runs it; the paged cache applies none")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scaling, window, softcap = settings
    out = call.attend(
        query[0], key[0], value[0], layer, kwargs.get("s_aux"), scaling=scaling, sliding_window=window, softcap=softcap
    )
    return out[None], None


@torch.library.custom_op("qkv::attend", mutates_args=())
def opaque_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink_logits: torch.Tensor | None,
    layer: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one layer as a single operator, for models under torch.compile: the compiler does not look inside, and what
    runs there finds the context of the step by itself. q [Hq, T, Dk], k [H, T, Dk], v [H, T, Dv] -> [T, Hq, Dv]."""
    call = current_context()
    if not isinstance(call, _Call):
        raise ModelError("a compiled model ran outside its engine; compile a copy of it for other uses")
    return call.attend(q, k, v, layer, sink_logits, scaling=scaling, sliding_window=window, softcap=softcap).contiguous()


@opaque_attend.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink_logits: torch.Tensor | None,
    layer: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v.shape[2])


class HFAdapter:
    """A model that runs on our attention, and is otherwise its user's. Several adapters may share one model.

    layers: its attention layers, by layer index. Raises ModelError for architectures whose attention a paged cache cannot stand
    in for. fused: use fused.py where it can. compile: torch.compile where it cannot. forward_path: whose forward runs, "fused" or
    "transformers" or "compiled", and the reason. min_rows: a forward needs that many, padding included; torch.compile would
    specialise on a single one. warnings: what users should know, also of what they changed since. Both go into records.

    While a forward runs, other threads must not use the model: one that does gets a ModelError, as a rule. (With the fused
    forward they may; it leaves the model alone.)
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        fused: bool = True,
        compile: bool = False,
    ) -> None:
        from transformers import AttentionInterface

        check_process()
        self.model, self.tokenizer = model, tokenizer
        self._wants_fused, self._wants_compiled = fused, compile
        accepted = inspect.signature(type(model).forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        check_config(model)
        check_weights(model)
        if "position_ids" not in accepted:
            raise ModelError(f"{type(model).__name__} takes no position_ids, so sequences cannot be packed into one batch")
        self.device, self.dtype = model.device, model.dtype  # from here on: the cache will be there, and of that kind
        self.warnings: list[str] = []
        AttentionInterface.register(NAME, attention_function)  # idempotent
        self._shared: SharedModel | None = share(model)
        self._shared.look()
        with self._shared.running():
            self.layers: list[LayerShape] = probe_layers(model, self.vocab_size)
        self._vocab_size = self.vocab_size
        self._choose_forward(self._shared)
        self._shared.settle_first()
        self._version = self._shared.version

    def _choose_forward(self, shared: SharedModel) -> None:
        """Fused, compiled or as it is: what suits the model as it is now."""
        self._compiled: Any = None
        hooked = shared.watch.hooked
        if hooked:
            names = _some(hooked)
            self._fused: FusedForward | str | None = f"it has forward hooks or a replaced forward ({names})"
            self._warn(
                f"forward hooks or a replaced forward ({names}) see packed batches [1, T] of all requests and of padding, and "
                "nothing of what comes from the prefix cache; when what they do changes, call reset_prefix_cache()"
            )
        elif self._wants_fused:
            self._fused = self._shared_fused(shared)
        else:
            self._fused = "runner.fused is false"
        if self._wants_compiled and not hooked and not isinstance(self._fused, FusedForward):
            if shared.compiled is None:
                shared.compiled = torch.compile(self.model, dynamic=True)
            self._compiled = shared.compiled
        self.min_rows = 1 if isinstance(self._fused, FusedForward) else 2
        self.forward_path = "fused"
        if not isinstance(self._fused, FusedForward):
            self.forward_path = f"{'transformers' if self._compiled is None else 'compiled'}: {self._fused}"

    def model_changed(self) -> bool:
        """Look at the model, before a step. Whether its user changed it since the last one: keys and values that were computed
        before are another model's then. From now on the forward is that of the model as it is now. Raises ModelError: it
        cannot be served like that, or not in this process."""
        check_process()
        shared = self._open()
        shared.look()
        if shared.version == self._version:
            return False
        self._check_still_served()
        self._choose_forward(shared)
        self._version = shared.version
        self._warn(
            f"the model was changed while the engine was open ({_some(shared.changed)}): what was cached is forgotten, and "
            "requests under way are computed anew. Scales, if there are any, are those of the model as it was"
        )
        return True

    def _check_still_served(self) -> None:
        check_weights(self.model)
        made = f"{self.dtype} on {self.device} with a vocabulary of {self._vocab_size}"
        now = f"{self.model.dtype} on {self.model.device} with a vocabulary of {self.vocab_size}"
        if made != now:
            raise ModelError(
                f"the model is {now}, and was {made} when the engine was made, whose cache is of that kind. Change the model "
                "back, or create a new engine"
            )

    @property
    def replayable(self) -> bool:
        """Whether a recorded forward can stand in for the model's: not where hooks want to be called."""
        return not self._open().watch.hooked

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        """One forward of a packed batch: input_ids [T] int64, positions [T] int64, logits_index [n] int64 (rows whose logits
        are wanted, n may be 0). Returns [n, V] in the dtype of the model's output head. Raises ModelError after close()."""
        shared, before = self._open(), context.calls
        forward = self._fused.forward if isinstance(self._fused, FusedForward) else self._transformers_forward
        with torch.inference_mode():
            logits = forward(input_ids, positions, logits_index, context)
        shared.settle()
        if context.calls - before != len(self.layers):
            raise ModelError(
                f"{context.calls - before} of {len(self.layers)} attention layers reached the paged cache; something changed the "
                "model's layers or their attention implementation while the engine was open"
            )
        return logits

    def _transformers_forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        run, wanted = self.model if self._compiled is None else self._compiled, len(logits_index)
        if self._compiled is not None:  # at least 2, and always a tensor made in inference mode: either would compile anew
            logits_index = torch.cat([logits_index, logits_index.new_zeros(max(0, 2 - wanted))])
        extra = {"logits_to_keep": logits_index} if self._keeps_logits else {}
        with self._open().running(), step_context(_Call(context, self.layers)):
            out = run(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **extra)
        logits: torch.Tensor = out.logits[0]
        return (logits if self._keeps_logits else logits[logits_index])[:wanted]

    def _shared_fused(self, shared: SharedModel) -> FusedForward | str:
        """The fused forward of the model, built and tried by the first adapter that wants it; or the reason why it has none."""
        if shared.fused is None:
            self._compiled = None
            try:
                shared.fused = fuse(self.model, self.layers, self._transformers_forward)
            except NotRecognised as reason:
                shared.fused = str(reason)
        return shared.fused

    def close(self) -> None:
        """Let go of the model. Calling it again does nothing."""
        self._shared = self._compiled = self._fused = None

    def _open(self) -> SharedModel:
        if self._shared is None:
            raise ModelError("this adapter is closed; create a new engine")
        return self._shared

    def _warn(self, text: str) -> None:
        """Once, in the log and in records."""
        if text not in self.warnings:
            self.warnings.append(text)
            log.warning(text)

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
    def _config(self) -> Any:
        return self.model.config.get_text_config()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
