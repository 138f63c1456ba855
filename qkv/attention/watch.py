"""Noticing that a model is no longer what it was: other modules, hooks, weights or settings.

Takes: a model, which its user may change at any time. Gives: whether it changed since it was last looked at, and what.
Does not know about: attention, engines, what to do about a change.

A glance costs microseconds per layer and runs before every step, so it builds flat lists in C and compares them. Weights
written through `.data` count no version; one element of every tensor is compared for that.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # so that NaN equals NaN
_SETTINGS = {  # of modules and configurations, beside all that are floats
    "sliding_window",
    "is_causal",
    "scaling",
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "final_logit_softcapping",
}
_PLAIN = (float, int, str, type(None))
_OF_EVERY_MODULE = {*torch.nn.Module().__dict__, "forward"}
_KNOWN = ("torch.nn.modules.", "transformers.")
_DICTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_IDLE_HOOKS = "transformers.utils.output_capturing"


class Watch:
    """One model. What its own forward changes is left out, once that was seen.

    modules: all of it, the model first. configs: the configurations that they read, outer ones first. hooked: modules with
    code that runs only when they are called: forward hooks, or a forward that was replaced on the object.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._restless: set[str] = set()  # what the model's own forward changes
        self.look()

    def changes(self) -> list[str]:
        """What changed since the last look, in words; it is looked at anew then."""
        if self._same_members() and self._glance() == self._seen:
            return []
        before = self._state
        self.look()
        return [name for name in {**before, **self._state} if before.get(name) != self._state.get(name)]

    def excuse(self, changes: list[str]) -> None:
        """These were changed by the model's own forward: they do not count from now on."""
        self._restless.update(changes)
        self.look()

    def look(self) -> None:
        """Remember the model as it is now."""
        self._named = list(self.model.named_modules())
        self.modules = [m for _, m in self._named]
        self.configs = self._find_configs()
        self._dicts = [m.__dict__ for m in self.modules]
        self._members = [d for name, m in self._named for d in self._members_of(name, m) if d]
        self._hooks = [getattr(m, kind) for m in self.modules for kind in _HOOKS]
        self._hooks += [torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks]
        self._classes = list({type(m) for m in self.modules})
        self._settings = [(d, key) for _, d, key in self._named_settings()]
        named = list(self._named_tensors())
        self._tensors = [t for _, t in named]
        self._versioned = [t for t in self._tensors if not t.is_inference()]
        self._samples = _Samples(self._tensors)
        self.hooked = self._find_hooked()
        self._kept = list(chain.from_iterable(map(dict.values, self._members)))
        self._objects = [d.get(key) for d, key in self._settings]  # kept, so that no other object gets the id of one that goes
        self._state: dict[str, Any] = dict(self._states(named))
        self._seen = self._glance()

    def _same_members(self) -> bool:
        """Whether modules have the same parameters, buffers and children: the objects, not their values."""
        members = chain.from_iterable(map(dict.values, self._members))
        return sum(map(len, self._members)) == len(self._kept) and all(map(is_, members, self._kept))

    def _glance(self) -> tuple[Any, ...]:
        return (
            list(map(type, self.modules)),
            [d["forward"] for d in self._dicts if "forward" in d],
            list(map(attrgetter("forward"), self._classes)),
            list(chain.from_iterable(self._hooks)) if any(self._hooks) else [],
            [_comparable(d.get(key)) for d, key in self._settings],
            list(map(torch.Tensor.data_ptr, self._tensors)),
            list(map(attrgetter("_version"), self._versioned)),
            self._samples.take(),
        )

    # -- the same with names, for a message ----------------------------------------------------------------------------

    def _states(self, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
        for name, m in self._named:
            if name not in self._restless:
                yield name or "its class", (id(m), type(m), type(m).forward, m.__dict__.get("forward"))
            yield f"hooks of {name or 'the model'}", _of_the_user(m)
        yield "hooks of every module", [list(hooks) for hooks in self._hooks[-2:]]
        for name, d, key in self._named_settings():
            yield name, _comparable(d.get(key))
        samples = self._samples.by_tensor()
        for name, t in tensors:
            yield name, (id(t), t.data_ptr(), None if t.is_inference() else t._version, samples.get(id(t)))

    def _find_configs(self) -> list[Any]:
        """All configurations that modules of the model read, outer ones first."""
        found = [m.__dict__["config"] for m in self.modules if "config" in m.__dict__]
        found += [inner for c in found for name in getattr(c, "sub_configs", {}) if (inner := getattr(c, name, None)) is not None]
        return list({id(c): c for c in found}.values())

    def _find_hooked(self) -> list[str]:
        names = [name or type(m).__name__ for name, m in self._named if any(_of_the_user(m)) or "forward" in m.__dict__]
        if any(self._hooks[-2:]):
            names.append("all modules, by torch.nn.modules.module.register_module_forward_hook")
        return names

    def _members_of(self, name: str, m: torch.nn.Module) -> Iterator[dict[str, Any]]:
        for kind in _DICTS:
            d = getattr(m, kind)
            if not any(_join(name, key) in self._restless for key in d):
                yield d

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, buffers and tensors that modules merely keep, if they have an address."""
        kept = ((_join(name, key), t) for name, m in self._named for key, t in m.__dict__.items() if isinstance(t, torch.Tensor))
        for name, t in chain(self.model.named_parameters(), self.model.named_buffers(), kept):
            if name not in self._restless:
                try:
                    t.data_ptr()
                except Exception:  # a tensor class of its own (quantized weights): only its identity is watched
                    continue
                yield name, t

    def _named_settings(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """What a forward reads besides tensors: numbers of modules and configurations, and all that modules keep whose class
        is neither torch's nor transformers' (wrapped layers, adapters)."""
        for name, m in self._named:
            foreign = not is_known(type(m))
            for key, value in m.__dict__.items():
                if (
                    key not in _OF_EVERY_MODULE
                    and (foreign or _is_setting(key, value))
                    and _join(name, key) not in self._restless
                ):
                    yield _join(name, key), m.__dict__, key
        for config in self.configs:
            for key, value in vars(config).items():
                if _is_setting(key, value):
                    yield f"config.{key}", vars(config), key


def is_known(kind: type) -> bool:
    """Whether a class of modules is torch's or transformers' own, so that it is known what it computes with."""
    return kind.__module__.startswith(_KNOWN)


def _is_setting(key: str, value: Any) -> bool:
    return (isinstance(value, float | bool) and not key.startswith("_")) or key in _SETTINGS


def _comparable(value: Any) -> Any:
    """Numbers and text by value, other things by identity."""
    return value if isinstance(value, _PLAIN) else id(value)


def _of_the_user(m: torch.nn.Module) -> list[list[int]]:
    """Handles of its forward hooks. Those that transformers leaves behind after output_hidden_states=True do nothing."""
    return [
        [handle for handle, hook in getattr(m, kind).items() if getattr(hook, "__module__", "") != _IDLE_HOOKS] for kind in _HOOKS
    ]


class _Samples:
    """One element of every tensor, read without arithmetic: on the host by numpy, elsewhere gathered and brought here."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._host: list[Any] = []
        self._host_ids: list[int] = []
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
        for t in tensors:
            if t.device.type == "meta" or t.numel() == 0 or t.layout != torch.strided or t.element_size() not in _BITS:
                continue
            try:
                flat = t.detach().as_strided((1,), (1,), _middle(t)).view(_BITS[t.element_size()])
            except Exception:  # a tensor class of its own, which may raise anything
                continue
            if t.device.type == "cpu":
                self._host.append(flat.numpy())
                self._host_ids.append(id(t))
            else:
                groups.setdefault((t.device, flat.dtype), []).append((id(t), flat))
        self._groups = list(groups.values())

    def take(self) -> list[Any]:
        taken = list(map(_FIRST, self._host))
        for group in self._groups:
            taken += torch.cat([x for _, x in group]).tolist()
        return taken

    def by_tensor(self) -> dict[int, Any]:
        ids = self._host_ids + [i for group in self._groups for i, _ in group]
        return dict(zip(ids, self.take(), strict=True))


_FIRST: Callable[[Any], Any] = itemgetter(0)


def _middle(t: torch.Tensor) -> int:
    """The storage offset of an element in the middle of every dimension."""
    return int(t.storage_offset()) + sum((n // 2) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
