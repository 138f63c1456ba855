"""What an attention backend must do, and the step context through which a forward reaches it.

Takes: Q and post-RoPE K and V of one layer. Gives: attention output, read from the pool after storing K and V.
Does not know about: requests, scheduling, transformers.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from qkv.layout import SIDES, AttentionMetadata, HeadFormat, KVFormat, LayerShape
from qkv.policies.quantizer._check import check_codes
from qkv.registry import Registry

if TYPE_CHECKING:
    from qkv.cache.store import KVStore
    from qkv.policies.quantizer.base import Quantizer

Reads = Literal["cache", "raw"]
# (layer index, q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv]) of real tokens, after RoPE
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass
class AttentionBackend(ABC):
    """Stores K and V of a call, once, and attends from the pool. Never two operations in the model graph."""

    name: ClassVar[str]
    keeps_raw_rows: ClassVar[bool] = False  # whether it writes and reads raw tails (block-unit formats) and sink rows
    fused: ClassVar[bool]  # False: the reference; needs attention.allow_reference where a fused backend was asked for
    capturable: ClassVar[bool] = False  # whether attend() over decodes may be captured in a CUDA graph: no host synchronisation

    @abstractmethod
    def supports(self, k: KVFormat, v: KVFormat, layer: LayerShape, B: int, device: torch.device) -> str | None:
        """None if this backend runs the formats on this layer, else the reason, as shown to the user.

        choose_backend asks for every head range of every layer (k and v: its formats, B: the block size) before the pool exists.
        """

    def declines(self, dtype: torch.dtype, reads: Reads, deterministic: bool) -> str | None:
        """None if this backend runs an engine of this compute dtype and these settings, else the reason, as shown to the user.

        Says too, by its text, when the backend cannot run on this machine at all. Asked once, before bind().
        """
        return None

    def bind(self, store: "KVStore", quantizer: "Quantizer", layers: list[LayerShape], reads: Reads, deterministic: bool) -> None:
        """The engine calls it once, after it has allocated the pool (`store`) and bound the quantizer to the same layers.

        Afterwards self._planes[layer] are the head ranges with their static parameters. Raises ConfigError for a quantizer whose
        encode or decode is not what its formats say.
        """
        check_codes(quantizer, layers, store.block_size, store.device)
        self._quantizer, self._layers = quantizer, layers
        self._planes = [
            [p.with_statics(s) for p, s in zip(store.planes(i), quantizer.statics(i), strict=True)] for i in range(len(layers))
        ]

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: AttentionMetadata,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encode and store K, V, then attend. Called once per layer of every forward, through the step context.

        q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv] in the compute dtype: the packed tokens that `meta` describes; sink_logits [Hq]
        or None. Returns [T, Hq, Dv] in q's dtype, zeros for padding rows. Softmax scale, window and softcap come with the bound
        LayerShape.
        """


BACKENDS: Registry[AttentionBackend] = Registry("attention backend", AttentionBackend, "qkv.attention")


def choose_backend(
    name: str,
    formats: list[list[HeadFormat]],
    layers: list[LayerShape],
    B: int,
    device: torch.device,
    allow_reference: bool,
    dtype: torch.dtype = torch.float32,
    reads: Reads = "cache",
    deterministic: bool = False,
) -> tuple[AttentionBackend, str]:
    """The backend called `name`, or for "auto" the first fused one that runs every layer, else the reference.

    Returns it with the reason for the choice (goes into every record). Raises ConfigError when the named backend does
    not run these formats, or when only the reference would and `allow_reference` is false.
    """
    from qkv.errors import ConfigError

    def refusal(backend: AttentionBackend) -> str | None:
        for layer, ranges in zip(layers, formats, strict=True):
            for r in ranges:
                raw = any(r.of(side).unit == "block" or r.of(side).sink_tokens for side in SIDES)
                reason = backend.supports(r.k, r.v, layer, B, device)
                if raw and not backend.keeps_raw_rows:
                    reason = f"the {backend.name} backend keeps no raw tails and no raw sink rows, which these formats need"
                if reason:
                    return f"layer {layer.index}: {reason}"
        return backend.declines(dtype, reads, deterministic)

    if name != "auto":
        backend = BACKENDS.build(name)
        reason = refusal(backend)
        if reason:
            raise ConfigError(f"attention.backend={name} cannot run this configuration: {reason}. Try attention.backend=auto")
        return backend, f"{name}: asked for"
    reasons: list[str] = []
    for candidate in sorted(BACKENDS.names(), key=lambda n: (not BACKENDS.get(n).fused, n)):
        backend = BACKENDS.build(candidate)
        reason = refusal(backend)
        if reason is None and (backend.fused or allow_reference):
            why = f"{candidate}: auto" + (f" ({'; '.join(reasons)})" if reasons else "")
            return backend, why
        reasons.append(f"{candidate}: {reason or 'attention.allow_reference is false'}")
    raise ConfigError(
        "no attention backend runs this configuration: " + "; ".join(reasons) + ". attention.allow_reference=true runs it unfused"
    )


@dataclass
class StepContext:
    """What one forward of one engine needs besides its tensors. Set by the runner around the model call."""

    backend: AttentionBackend
    meta: AttentionMetadata
    observer: Observer | None = None
    deterministic: bool = False  # a row's result may not depend on its batch
    calls: int = field(default=0)  # attention layers served; the adapter checks it against the model's layer count

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The backend's attend, as a model's forward reaches it."""
        if self.observer is not None:
            real = self.meta.query_start_list[-1]
            self.observer(layer, q[:real], k[:real], v[:real])
        self.calls += 1
        return self.backend.attend(layer, q, k, v, self.meta, sink_logits)


_active = threading.local()


@contextmanager
def step_context(context: "StepContext | object") -> Iterator[None]:
    """Make `context` the one that attention calls of this thread reach. Restores the previous one, also on errors."""
    previous = getattr(_active, "context", None)
    _active.context = context
    try:
        yield
    finally:
        _active.context = previous


def current_context() -> object | None:
    return getattr(_active, "context", None)
