"""Statistics to a scale file, by any method: what the command, the Python function and the experiments have in common.

Takes: statistics, a quantizer, and for method=output an engine with documents. Gives: a ScaleFile that fits the engine's model.
Does not know about: where the documents came from, what the scales cost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibration.fitting import search
from calibration.fitting.collect import quantizer_metadata
from calibration.fitting.ranges import RANGE_KINDS
from calibration.fitting.statistics import Statistics
from qkv.errors import ConfigError
from qkv.policies.quantizer.base import QUANTIZERS, Quantizer
from qkv.scales import ScaleFile

if TYPE_CHECKING:
    from qkv.engine import Engine


def static_quantizer(spec: str | Mapping[str, Any]) -> Quantizer:
    """The quantizer of that name and those settings. Raises ConfigError if it has nothing to calibrate."""
    quantizer: Quantizer = QUANTIZERS.build(spec)
    if not quantizer.observers():
        able = [name for name in QUANTIZERS.names() if QUANTIZERS.build(name).observers()]
        raise ConfigError(f"quantizer {quantizer.name} has no static scales to calibrate; those that have: {', '.join(able)}")
    return quantizer


def fit(
    engine: "Engine",
    statistics: Statistics,
    quantizer: Quantizer,
    method: search.Method,
    percentile: float,
    searched: Sequence[Sequence[int]] = (),
    progress: Callable[[int], None] | None = None,
) -> ScaleFile:
    """The scales that `method` finds for `quantizer`, validated for the engine's model.

    percentile: of method=percentile. searched: the documents that method=output runs, with progress(tokens) after each.
    Raises ConfigError where the method does not go with the quantizer, ScaleError where the scales would be unusable.
    """
    others = sorted(name for name in quantizer.observers() if name[2:] not in RANGE_KINDS)
    if others and method != "absmax":
        raise ConfigError(
            f"method={method} chooses ranges, but quantizer {quantizer.name} makes its tensors from {', '.join(others)}, which "
            "no range determines; use method=absmax, which takes statistics as they were collected"
        )
    if method == "output":
        choices = search.least_output_error(quantizer, statistics.layers, engine, searched, progress)
        tensors = search.at(quantizer, statistics.layers, choices, cover=False)
    else:
        tensors = search.tensors(quantizer, statistics.layers, engine.layers, method, percentile)
    how: dict[str, Any] = {"percentile": percentile} if method == "percentile" else {}
    how["coverage"] = {"layers": len(statistics.layers), "of": len(engine.layers)}
    file = ScaleFile(tensors, statistics.metadata | quantizer_metadata(quantizer, method) | how)
    file.validate(engine.layers, quantizer.name, engine.loaded.fingerprint, quantizer.static_tensors())
    return file
