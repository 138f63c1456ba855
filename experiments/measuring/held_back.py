"""Measures perplexity and KL divergence of several scale files on the same documents, beside the unquantized run.

Takes: documents, scale files. Gives: accuracy and memory with each file. Does not know about: how the scales were found.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from calibration.text.sample import Sample
from experiments.harness.table import console
from experiments.measuring import engines
from experiments.measuring.divergence import Accuracy, score_document
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.models import LoadedModel
from qkv.scales import ScaleFile

_ROW_ON_SCREEN = 240  # characters of a row


class Scored(NamedTuple):
    """What one scale file scored. accuracy: sums per document. part: the `accuracy` part of a row. memory, attention, warnings:
    what the engine reported."""

    accuracy: Accuracy
    part: dict[str, Any]
    memory: dict[str, Any]
    attention: dict[str, Any]
    warnings: list[str]


def score(
    config: EngineConfig,
    loaded: LoadedModel,
    documents: Sequence[list[int]],
    files: Sequence[ScaleFile],
    progress: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Score the configured quantizer with each of `files`, against `none`. documents: of at least 2 tokens each. progress is
    called after each document with the tokens that were run."""
    config = engines.single_document(config, max(map(len, documents)))
    with ExitStack() as open_engines:

        def opened(engine: Engine) -> Engine:
            open_engines.callback(engine.close)
            return engine

        baseline = opened(engines.build(config, loaded, "none"))
        contenders = [opened(engines.build(config, loaded, config.quantizer, file)) for file in files]
        accuracies = [Accuracy() for _ in files]
        for tokens in documents:
            score_document(tokens, baseline, list(zip(contenders, accuracies, strict=True)), Accuracy())
            if progress:
                progress(len(tokens) * (1 + len(files)))
        out = []
        for engine, accuracy in zip(contenders, accuracies, strict=True):
            metrics = engine.metrics()
            out.append(Scored(accuracy, accuracy.part(metrics), metrics["memory"], metrics["attention"], metrics["warnings"]))
        return out


def show_reading(name: str, sample: Sample) -> None:
    """Print what became of the rows, the first of them as they were read, and how documents were drawn."""
    rows = [f"  row {i} read as: {' '.join(text.split())}" for i, text in enumerate(sample.report.shown(_ROW_ON_SCREEN), 1)]
    console().print("\n".join([f"data {name}: {sample.report.line()}", *rows, sample.how]), soft_wrap=True, markup=False)
