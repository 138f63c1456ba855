"""Scale files: static quantization parameters with the record of where they came from.

Takes: tensors named "layers.{index}.{name}", and what a quantizer declares of them. Gives: the same, checked.
Does not know about: how scales are chosen, what a quantizer does with them.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qkv.errors import ScaleError
from qkv.layout import LayerShape, Side

FORMAT_VERSION = 1
_NAME = re.compile(r"layers\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class StaticTensor:
    """A tensor that a quantizer takes from its scale file for every layer: float32, named "layers.{index}.{side}_{kind}".

    shape: axes as LayerShape names them (H, Hq), "D" for the head dim of the side, or numbers.
    statistics: kinds of what calibration must collect of that side; make(*statistics) gives the tensor of one layer.
    positive: its values must be finite and above 0, as scales are; otherwise finite.
    default: the value of every element where there is no scale file; None: a scale file is needed.
    """

    side: Side
    kind: str
    shape: tuple[str | int, ...]
    statistics: tuple[str, ...]
    make: Callable[..., torch.Tensor]
    positive: bool = False
    default: float | None = None

    @property
    def name(self) -> str:
        return f"{self.side}_{self.kind}"

    @property
    def observed(self) -> tuple[str, ...]:
        """The statistics by their full names, as in "k_channel_absmax"."""
        return tuple(f"{self.side}_{kind}" for kind in self.statistics)

    def shape_in(self, layer: LayerShape) -> tuple[int, ...]:
        sizes = {"H": layer.H, "Hq": layer.Hq, "D": layer.dim(self.side)}
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.shape)


@dataclass
class ScaleFile:
    """Static scales of one model and one quantizer.

    tensors: {"layers.{index}.{name}": tensor}, for every layer and every name that the quantizer declares, such as k_scale.
    metadata, JSON values: format_version, model (name), model_fingerprint, quantizer (name), quantizer_fields, method,
        data_fingerprint, documents, tokens, versions {library: version}, date, warnings (of whoever made it).
    warnings: what a record must say, filled by validate().
    """

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def save(self, path: str | Path) -> None:
        """Write safetensors; each metadata value is JSON text. Atomic. Raises ScaleError naming path and cause."""
        part = Path(f"{path}.part")
        header = {key: json.dumps(value) for key, value in ({"format_version": FORMAT_VERSION} | self.metadata).items()}
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: t.detach().cpu().contiguous().clone() for name, t in self.tensors.items()}, part, header)
            os.replace(part, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise ScaleError(f"cannot write scale file '{path}': {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> "ScaleFile":
        """Read what save() wrote. Raises ScaleError, in one line, for anything else."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except FileNotFoundError:
            raise ScaleError(f"scale file '{path}' does not exist; write one with: python -m calibration.run") from None
        except (OSError, SafetensorError, ValueError) as error:
            raise ScaleError(f"'{path}' is not a readable scale file: {' '.join(str(error).split())}") from None
        if metadata.get("format_version") != FORMAT_VERSION:
            found = metadata.get("format_version")
            raise ScaleError(f"'{path}' has scale format version {found}, this version reads {FORMAT_VERSION}; calibrate again")
        return cls(tensors, metadata)

    @classmethod
    def of(cls, given: "str | Path | ScaleFile | None") -> "ScaleFile | None":
        """What the setting `scales` means: a path is read, a ScaleFile is itself. Raises ScaleError."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, str | Path):
            raise ScaleError(f"scales={given!r} is not allowed; it must be the path of a scale file, a ScaleFile, or null")
        return cls.load(Path(given).expanduser())

    def fingerprint(self) -> str:
        """Identity of what the scales do to stored bytes: tensors, quantizer and model. xxh3_128, hex."""
        digest = xxhash.xxh3_128()
        for name in sorted(self.tensors):
            t = self.tensors[name].detach().cpu().contiguous()
            digest.update(f"{name}:{t.dtype}:{tuple(t.shape)}".encode())
            digest.update(t.flatten().view(torch.uint8).numpy().tobytes())
        identity = {key: self.metadata.get(key) for key in ("model_fingerprint", "quantizer", "quantizer_fields")}
        digest.update(json.dumps(identity, sort_keys=True).encode())
        return digest.hexdigest()

    def validate(
        self, layers: Sequence[LayerShape], quantizer: str, model_fingerprint: str, declared: Sequence[StaticTensor]
    ) -> None:
        """Check that these are usable tensors of this model for this quantizer, which declares what it reads; fills `warnings`.

        model_fingerprint "" means the caller cannot know it. Raises ScaleError naming the layer and the cause.
        """
        made_for = self.metadata.get("quantizer")
        if made_for != quantizer:
            raise ScaleError(
                f"scale file was made for quantizer '{made_for}', not '{quantizer}'; calibrate again for '{quantizer}'"
            )
        found = self.metadata.get("model_fingerprint")
        if model_fingerprint and found != model_fingerprint:
            raise ScaleError(
                f"scale file belongs to another model: it was made for '{self.metadata.get('model', 'unknown')}' "
                f"(fingerprint {found}), this model has fingerprint {model_fingerprint}; calibrate again on this model"
            )
        if not self.tensors:
            raise ScaleError("scale file holds no tensors; calibrate again")
        self.check_names(layers, declared)
        scales = [self.tensor(layer, t) for layer in layers for t in declared if t.positive]
        others = [self.tensor(layer, t) for layer in layers for t in declared if not t.positive]
        uncalibrated = bool(scales) and all(bool((t == 1).all()) for t in scales) and not any(bool(t.any()) for t in others)
        self.warnings = [str(warning) for warning in self.metadata.get("warnings") or []]
        if uncalibrated:
            self.warnings.append("every static scale is exactly 1.0: the scale file looks uncalibrated")

    def check_names(self, layers: Sequence[LayerShape], declared: Sequence[StaticTensor]) -> None:
        """Raises ScaleError naming the layer if the file holds a tensor that the quantizer would not read."""
        names = sorted(t.name for t in declared)
        for name in self.tensors:
            match = _NAME.fullmatch(name)
            if not match:
                raise ScaleError(f"scale file: unknown tensor '{name}'; names are layers.<index>.<name>, as in layers.0.k_scale")
            if int(match[1]) not in {layer.index for layer in layers}:
                raise ScaleError(f"scale file: layer {match[1]} is not an attention layer of this model ({len(layers)} layers)")
            if match[2] not in names:
                raise ScaleError(
                    f"scale file: layer {match[1]}: the quantizer, with these settings, reads no {match[2]}; it reads "
                    f"{', '.join(names) or 'nothing'}. Use the settings that the file was made with, or calibrate again"
                )

    def tensor(self, layer: LayerShape, declared: StaticTensor) -> torch.Tensor:
        """The float32 tensor of a layer, checked: present, of the declared shape, finite, positive where declared so.

        Raises ScaleError naming layer and cause.
        """
        where = f"scale file: layer {layer.index}: {declared.name}"
        value = self.tensors.get(f"layers.{layer.index}.{declared.name}")
        if value is None:
            raise ScaleError(f"{where} is missing; calibrate again with this model and quantizer")
        shape = declared.shape_in(layer)
        if tuple(value.shape) != shape:
            raise ScaleError(f"{where} has shape {list(value.shape)}, this model and quantizer need {list(shape)}")
        value = value.to(torch.float32)
        bad = ~(value.isfinite() & (value > 0)) if declared.positive else ~value.isfinite()
        if bool(bad.any()):
            needs = "finite and positive" if declared.positive else "finite"
            raise ScaleError(
                f"{where} holds {value[bad][0].item()} ({int(bad.sum())} of {bad.numel()} values); it must be {needs}"
            )
        return value
