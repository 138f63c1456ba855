"""Where a quantizer's static scales come from in an experiment: the given file, or calibration in memory, said aloud.

Takes: a quantizer. Gives: its ScaleFile or None, and where it came from in words. Does not know about: other quantizers.
"""

import torch

from calibration.collect import Collector, calibrate
from calibration.data import windows
from experiments import measure
from experiments.base import Run
from experiments.table import console
from qkv.layout import LayerShape
from qkv.models import LoadedModel
from qkv.policies.quantizer.base import Quantizer
from qkv.scales import ScaleFile


def provide(
    run: Run, loaded: LoadedModel, quantizer: Quantizer, documents: int, tokens: int, skip: int
) -> tuple[ScaleFile | None, str | None]:
    """The file of `scales` if it was made for this quantizer; else, if it needs scales, calibrated on `documents` windows
    of `tokens` tokens of the run's data, after skipping the first `skip` windows; else none.

    Raises ScaleError, ConfigError (too little text).
    """
    if run.engine.scales is not None:
        file = ScaleFile.load(run.engine.scales)
        if file.metadata.get("quantizer") == quantizer.name:
            return file, str(run.engine.scales)
    if not quantizer.needs_scales:
        return None, None
    text = windows(run.data, loaded.tokenizer, documents, tokens, run.engine.seed, skip)
    engine = measure.engine(measure.single_document(run.engine, tokens), loaded, "none")
    try:
        file = calibrate(engine, text, quantizer)
    finally:
        engine.close()
    origin = f"calibrated in memory: {documents} documents, {documents * tokens:,} tokens of {run.data.name}"
    console().print(f"{quantizer.name}: no scale file given, {origin}")
    return file, origin


def stand_in(quantizer: Quantizer, layers: list[LayerShape]) -> ScaleFile | None:
    """Scales of random keys and values, for planning and simulation, where sizes matter and values do not; None if it
    takes none."""
    if not quantizer.observers():
        return None
    collector, generator = Collector(sorted(quantizer.observers())), torch.Generator().manual_seed(0)
    for layer in layers:
        k, v = (torch.randn(4, layer.H, D, generator=generator) for D in (layer.Dk, layer.Dv))
        collector(layer.index, k, k, v)
    return ScaleFile(quantizer.tensors_from_stats(collector.stats), {"quantizer": quantizer.name})
