"""Provides a quantizer's static scales in an experiment: those of the given file, or calibrated in memory, and says so.

Takes: a quantizer. Gives: its ScaleFile or None, and in words where it came from. Does not know about: other quantizers.
"""

from collections.abc import Sequence

import torch

from calibration.fitting.collect import Collector, absmax_scales
from calibration.text.data import DataSource, windows
from experiments.harness.base import Run
from experiments.harness.table import console
from experiments.measuring import engines
from qkv.config import EngineConfig
from qkv.errors import ScaleError
from qkv.layout import LayerShape
from qkv.models import LoadedModel
from qkv.policies.quantizer.base import Quantizer
from qkv.scales import ScaleFile


def provide(
    run: Run, loaded: LoadedModel, quantizer: Quantizer, documents: int, tokens: int, skip: int
) -> tuple[ScaleFile | None, str | None]:
    """The file that the setting `scales` names, if it was made for this quantizer. Otherwise, for a quantizer that needs scales,
    scales calibrated on `documents` windows of `tokens` tokens of the run's data, after the first `skip` windows. Otherwise None.
    An experiment that compares several quantizers checks with used_by() that a given file is for one of them.

    Raises ScaleError, or ConfigError where there is too little text.
    """
    file = given(run)
    if file is not None and file.metadata.get("quantizer") == quantizer.name and quantizer.static_tensors():
        return file, str(run.engine.scales)
    if not quantizer.needs_scales:
        return None, None
    file, origin = in_memory(run.engine, loaded, quantizer, run.data, documents, tokens, skip)
    console().print(f"{quantizer.name}: no scale file given for it, {origin}")
    return file, origin


def in_memory(
    config: EngineConfig, loaded: LoadedModel, quantizer: Quantizer, data: DataSource, documents: int, tokens: int, skip: int = 0
) -> tuple[ScaleFile, str]:
    """Scales calibrated on `documents` windows of `tokens` tokens, after the first `skip`, and in words where they come from.
    Raises ConfigError where there is too little text."""
    # One token less than the windows have, since running a document asks for one new token.
    text = [window[:-1] for window in windows(data, loaded.tokenizer, documents, tokens, config.seed, skip)]
    engine = engines.build(engines.single_document(config, tokens), loaded, "none")
    try:
        file = absmax_scales(engine, text, quantizer)
    finally:
        engine.close()
    return file, f"calibrated in memory: {documents} documents, {sum(map(len, text)):,} tokens of {data.name}"


def given(run: Run) -> ScaleFile | None:
    """The file that the setting `scales` names, if it names one. Raises ScaleError."""
    return ScaleFile.of(run.engine.scales)


def used_by(run: Run, quantizers: Sequence[Quantizer]) -> None:
    """Raise ScaleError if a scale file is given and none of the quantizers would use it: scales are never dropped silently."""
    file = given(run)
    able = [q.name for q in quantizers if q.static_tensors()]
    if file is not None and file.metadata.get("quantizer") not in able:
        raise ScaleError(
            f"scales={run.engine.scales} was made for quantizer '{file.metadata.get('quantizer')}', which is not among those "
            f"here that take scales ({', '.join(able) or 'none'}); add that quantizer, give another file, or scales=null"
        )


def stand_in(quantizer: Quantizer, layers: list[LayerShape]) -> ScaleFile | None:
    """Scales of random keys and values, for arithmetic and simulation, where sizes matter and values do not. None for a quantizer
    that takes no scales."""
    if not quantizer.observers():
        return None
    collector, generator = Collector(sorted(quantizer.observers())), torch.Generator().manual_seed(0)
    for layer in layers:
        k, v = (torch.randn(4, layer.H, D, generator=generator) for D in (layer.Dk, layer.Dv))
        collector(layer.index, k, k, v)
    return ScaleFile(quantizer.tensors_from_stats(collector.stats), {"quantizer": quantizer.name})
