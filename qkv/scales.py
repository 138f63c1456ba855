"""Scale files: static quantization parameters with the record of where they came from.

Takes: tensors named "layers.{index}.{kind}", kind one of k_scale, v_scale, k_zero, v_zero. Gives: the same, checked.
Does not know about: how scales are chosen, what a quantizer does with them.
"""

import contextlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qkv.errors import ScaleError
from qkv.layout import LayerShape

FORMAT_VERSION = 1
_NAME = re.compile(r"layers\.(\d+)\.([kv]_(?:scale|zero))")


@dataclass
class ScaleFile:
    """Static scales of one model and one quantizer.

    tensors: {"layers.{index}.k_scale": [H] or [H, Dk], "layers.{index}.v_scale": [H] or [H, Dv], "…k_zero", "…v_zero"}.
    metadata, JSON values: format_version, model (name), model_fingerprint, quantizer (name), quantizer_fields, method,
        data_fingerprint, documents, tokens, versions {library: version}, date.
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
        return cls.load(os.path.expanduser(given))

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

    def validate(self, layers: list[LayerShape], quantizer: str, model_fingerprint: str) -> None:
        """Check that these are usable scales of this model for this quantizer; fills `warnings`.

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
        kinds = set()
        for name in self.tensors:
            match = _NAME.fullmatch(name)
            if not match:
                raise ScaleError(
                    f"scale file: unknown tensor '{name}'; names are layers.<index>.k_scale, v_scale, k_zero or v_zero"
                )
            if int(match[1]) not in {layer.index for layer in layers}:
                raise ScaleError(f"scale file: layer {match[1]} is not an attention layer of this model ({len(layers)} layers)")
            kinds.add(match[2])
        if not kinds:
            raise ScaleError("scale file holds no scales; calibrate again")
        for layer in layers:
            for kind in sorted(kinds):
                D = layer.Dk if kind.startswith("k") else layer.Dv
                self.tensor(layer, kind, (layer.H,), (layer.H, D))
        scales = [t for name, t in self.tensors.items() if name.endswith("_scale")]
        self.warnings = (
            ["every static scale is exactly 1.0: the scale file looks uncalibrated"]
            if all(bool((t == 1).all()) for t in scales)
            else []
        )

    def tensor(self, layer: LayerShape, kind: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """The float32 tensor "layers.{index}.{kind}", checked: present, one of `shapes`, finite, positive if a scale.

        Raises ScaleError naming layer and cause.
        """
        where = f"scale file: layer {layer.index}: {kind}"
        value = self.tensors.get(f"layers.{layer.index}.{kind}")
        if value is None:
            raise ScaleError(f"{where} is missing; calibrate again with this model and quantizer")
        if tuple(value.shape) not in shapes:
            allowed = " or ".join(str(list(s)) for s in shapes)
            raise ScaleError(f"{where} has shape {list(value.shape)}, this model needs {allowed}")
        value = value.to(torch.float32)
        bad = ~value.isfinite() if kind.endswith("zero") else ~(value.isfinite() & (value > 0))
        if bool(bad.any()):
            needs = "finite" if kind.endswith("zero") else "finite and positive"
            raise ScaleError(
                f"{where} holds {value[bad][0].item()} ({int(bad.sum())} of {bad.numel()} values); it must be {needs}"
            )
        return value
