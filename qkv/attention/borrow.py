"""A model that belongs to its user, and that adapters run: ours for the time of a forward, watched between forwards.

Takes: a PreTrainedModel. Gives: a context in which its attention layers call ours, and news of what its user changed.
Does not know about: what our attention does, contexts of steps.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from qkv.attention.watch import Watch
from qkv.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qkv.attention.fused import FusedForward

log = logging.getLogger(__name__)

NAME = "qkv"  # of our attention function within transformers


class SharedModel:
    """What the adapters of one model have in common. Lives as long as one of them is open. Raises ModelError.

    version: how often a change of the model was noticed. changed: what, the last time. compiled: it under torch.compile, if an
    adapter wanted that. fused: its fused forward, or why it has none; None: not tried yet.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = model
        self.version, self.changed = 0, [""]
        self.compiled: Any = None
        self.fused: FusedForward | str | None = None
        self.watch = Watch(model)
        self._unsettled: list[str] = []  # what changed before the forward that comes next
        self._idle, self._forwards = threading.Condition(), 0
        self._own: list[tuple[Any, str]] = []
        self._training: list[torch.nn.Module] = []
        self._find_configs()

    @contextmanager
    def running(self) -> Iterator[None]:
        """For a forward: the model has our attention and is in eval mode; afterwards it is as it was. Threads may overlap."""
        with self._idle:
            self._forwards += 1
            if self._forwards == 1:
                self._own = [(c, c._attn_implementation) for c in self._configs]
                self._training = [m for m in self.watch.modules if m.training]
                for config in self._configs:
                    config._attn_implementation = NAME
                for module in self._training:
                    module.training = False
        try:
            yield
        finally:
            with self._idle:
                self._forwards -= 1
                if self._forwards == 0:
                    _restore(self._own)
                    for module in self._training:
                        module.training = True
                    self._idle.notify_all()

    def look(self) -> None:
        """Before a step: note what changed since the last one."""
        with self._idle:
            changes = self.watch.changes()
            if changes:
                self._note(changes)
                self._unsettled = changes
                self._idle.wait_for(lambda: self._forwards == 0)
                self._find_configs()

    def settle(self) -> None:
        """After a forward: what changed before it and changed again in it is changed by the model itself, not by its user."""
        if self._unsettled:
            with self._idle:
                again, before, self._unsettled = self.watch.changes(), self._unsettled, []
                self.watch.excuse([c for c in again if c in before])
                if any(c not in before for c in again):
                    self._note(again)

    def settle_first(self) -> None:
        """After an adapter's first forwards: what changed in them is the model's own doing."""
        with self._idle:
            self.watch.excuse(self.watch.changes())

    def _note(self, changes: list[str]) -> None:
        """The forwards that were made for the model as it was are no good any more."""
        self.version, self.changed = self.version + 1, changes
        self.compiled = self.fused = None
        log.debug("the model changed: %s", ", ".join(changes))

    def _find_configs(self) -> None:
        """The configurations through which transformers gives the model its attention."""
        model = self.model
        own = [(c, c._attn_implementation) for c in self.watch.configs if hasattr(c, "_attn_implementation")]
        try:
            model.set_attn_implementation(NAME)
            self._configs = [c for c, _ in own if c._attn_implementation == NAME]
            if not any(c is model.config.get_text_config() for c in self._configs):
                raise ModelError(
                    f"{type(model).__name__} does not call attention through transformers' AttentionInterface, so its keys and "
                    "values cannot be paged (it would silently run its own attention)"
                )
        finally:  # a copy that was made in the middle of a forward has our attention, and never had another
            _restore([(c, ("sdpa" if model._supports_sdpa else "eager") if name == NAME else name) for c, name in own])


def _restore(implementations: list[tuple[Any, str]]) -> None:
    for config, name in implementations:  # outer first: setting an outer one also sets those inside it
        config._attn_implementation = name


_shared: "WeakValueDictionary[int, SharedModel]" = WeakValueDictionary()  # by the id of the model, which the value keeps alive
_sharing = threading.Lock()
_process: int | None = None  # that made the first adapter: torch has its threads


def share(model: "PreTrainedModel") -> SharedModel:
    """What is known of the model already, or its first look. Raises ModelError."""
    global _process
    with _sharing:
        shared = _shared.get(id(model))
        if shared is None:
            shared = _shared[id(model)] = SharedModel(model)
    _process = _process or os.getpid()
    return shared


def check_process() -> None:
    """Raises ModelError in a forked child: the threads of torch's operators stayed in the parent, and waiting for them hangs."""
    if _process not in (None, os.getpid()) and torch.get_num_threads() > 1:
        raise ModelError(
            "this process was forked from one that has run a model; torch's threads do not survive a fork, and it would hang. "
            "Start it with multiprocessing's 'spawn' and make the engine in it, or call torch.set_num_threads(1) in it first"
        )
