"""Two or more calibrations of one model into one, exactly as if all documents had been in one run.

    python -m calibration.merge a.safetensors b.safetensors --out both.safetensors

Takes: scale files with their statistics beside them. Gives: a scale file and its statistics. Loads no model.
Method and quantizer are those of the first file; method=output cannot be merged, because it measured on documents.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration.fitting import search
from calibration.fitting.collect import quantizer_metadata
from calibration.fitting.statistics import Statistics, statistics_path
from qkv.errors import QkvError, ScaleError
from qkv.layout import LayerShape
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile


def merge(paths: Sequence[str | Path]) -> tuple[ScaleFile, Statistics]:
    """Raises ScaleError naming the file and the cause."""
    first = ScaleFile.load(paths[0])
    method, spec = first.metadata.get("method"), {"name": first.metadata.get("quantizer"), **_fields(first.metadata)}
    if method not in ("absmax", "percentile", "mse"):
        raise ScaleError(
            f"'{paths[0]}' was made with method={method}, which statistics alone do not repeat; "
            "calibrate the shards with absmax, percentile or mse, or run one calibration over all documents"
        )
    total = _statistics(paths[0])
    for path in paths[1:]:
        total = total.merged(_statistics(path))
    quantizer, keep = QUANTIZERS.build(spec), float(first.metadata.get("percentile", 100.0))
    tensors = search.tensors(quantizer, total.layers, _layers(total), method, keep)
    extra = {"percentile": keep} if method == "percentile" else {}
    return ScaleFile(tensors, total.metadata | quantizer_metadata(quantizer, method) | extra | {"kind": "scales"}), total


def _fields(metadata: dict[str, Any]) -> dict[str, Any]:
    return dict(metadata.get("quantizer_fields") or {})


def _statistics(path: str | Path) -> Statistics:
    beside = statistics_path(path)
    if not beside.exists():
        raise ScaleError(f"'{path}' has no statistics beside it ('{beside}'), without which it cannot be merged")
    return Statistics.load(beside)


def _layers(statistics: Statistics) -> list[LayerShape]:
    """Shapes as far as quantizers need them to encode; what only attention needs is not in the statistics."""
    shapes = []
    for i, stats in sorted(statistics.layers.items()):
        (H, Dk), Dv = stats["k_channel_min"].shape, stats["v_channel_min"].shape[-1]
        shapes.append(LayerShape(index=i, H=H, Hq=H, Dk=Dk, Dv=Dv, scaling=1.0))
    return shapes


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a file cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m calibration.merge", description="Merge calibrations of one model.")
    parser.add_argument("files", nargs="+", help="scale files, each with its .stats.safetensors beside it")
    parser.add_argument("--out", default="scales.safetensors", help="the merged scale file (default: scales.safetensors)")
    given = parser.parse_args(arguments)
    try:
        scales, statistics = merge(given.files)
        statistics.save(statistics_path(given.out))
        scales.save(given.out)
    except QkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: {statistics.metadata['documents']:,} documents, {statistics.metadata['tokens']:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
