"""Statistics on disk: the checkpoint of a running calibration, and the file beside every scale file that shards are merged from.

Takes: per layer statistics and their provenance. Gives: one safetensors file, written atomically. Two files of one model add up.
Does not know about: how statistics are gathered or used.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from calibration.fitting.collect import STATISTICS, Stats, combined, text_warnings
from qkv.errors import ScaleError
from qkv.scales import ScaleFile

KIND = "statistics"
_NAME = re.compile(r"layers\.(\d+)\.(\w+)")
_SAME = ("model_fingerprint", "sink_tokens", "dtype")  # what must agree before two files may be added


def statistics_path(scales: str | Path) -> Path:
    """scales.safetensors -> scales.stats.safetensors, where calibration puts the statistics."""
    path = Path(scales)
    return path.with_name(f"{path.name.removesuffix('.safetensors')}.stats.safetensors")


@dataclass
class Statistics:
    """layers: {layer index: {name: tensor}}, names as in collect.STATISTICS. metadata: provenance, JSON values."""

    layers: dict[int, Stats] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Atomic. Raises ScaleError naming path and cause."""
        tensors = {f"layers.{i}.{name}": t for i, stats in self.layers.items() for name, t in stats.items()}
        ScaleFile(tensors, self.metadata | {"kind": KIND}).save(path)

    @classmethod
    def load(cls, path: str | Path) -> "Statistics":
        """Read what save() wrote. Raises ScaleError, in one line, for anything else."""
        file = ScaleFile.load(path)
        if file.metadata.get("kind") != KIND:
            raise ScaleError(f"'{path}' holds scales, not statistics; calibration writes those to '{statistics_path(path)}'")
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in file.tensors.items():
            match = _NAME.fullmatch(name)
            if not match or match[2] not in STATISTICS:
                raise ScaleError(f"'{path}': unknown tensor '{name}'; the file was written by another version")
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
        return cls(layers, file.metadata)

    def merged(self, other: "Statistics") -> "Statistics":
        """Of the documents of both: exactly what one run over all of them would give. Raises ScaleError if they do not fit."""
        a, b = self.metadata, other.metadata
        for key in _SAME:
            if a.get(key) != b.get(key):
                raise ScaleError(f"these statistics do not add up: {key} is {a.get(key)} in one and {b.get(key)} in the other")
        if self.layers.keys() != other.layers.keys():
            raise ScaleError("these statistics do not add up: they cover different layers")
        shards = {s["data_fingerprint"]: s for s in [*shards_of(a), *shards_of(b)]}
        if len(shards) < len(shards_of(a)) + len(shards_of(b)):
            raise ScaleError("these statistics do not add up: both hold the same documents, which would count twice")
        total: dict[str, Any] = {key: a.get(key, 0) + b.get(key, 0) for key in ("documents", "tokens")}
        total["warnings"] = text_warnings(total["tokens"])
        data = "+".join(sorted(shards))
        layers = {i: combined(stats, other.layers[i]) for i, stats in self.layers.items()}
        return Statistics(layers, a | total | {"data_fingerprint": data, "shards": list(shards.values())})


def shards_of(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs a file was added up from; a file of one run is its own shard."""
    own = {key: metadata.get(key) for key in ("data_fingerprint", "data", "documents", "tokens")}
    shards: list[dict[str, Any]] = metadata.get("shards") or [own]
    return shards
