"""The long part of a calibration: documents through the model, with a checkpoint every few of them, so that a killed run resumes.

Takes: an engine that stores K and V unquantized, documents, a path. Gives: Statistics. Does not know about: quantizers, methods.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.fitting.collect import FULL, Collector, check_finite, identity, provenance, run_document
from calibration.fitting.statistics import Statistics
from qkv.errors import ScaleError

if TYPE_CHECKING:
    from qkv.engine import Engine

log = logging.getLogger(__name__)


def observed(
    engine: "Engine", documents: Sequence[Sequence[int]], sink_tokens: int, progress: Callable[[int], None] | None = None
) -> Statistics:
    """Statistics of all documents, in memory only. progress(tokens) after each. Raises ScaleError as gather() does."""
    collector = Collector(FULL, sink_tokens)
    with engine.observe(collector):
        for tokens in documents:
            collector.begin()
            run_document(engine, tokens)
            if progress:
                progress(len(tokens))
    check_finite(collector.stats, engine.layers)
    return Statistics(collector.stats, provenance(engine, documents, sink_tokens))


def gather(
    engine: "Engine",
    documents: Sequence[Sequence[int]],
    sink_tokens: int,
    checkpoint: Path,
    every: int,
    progress: Callable[[int], None] | None = None,
) -> Statistics:
    """Statistics of all documents. progress(tokens) after each one, resumed ones included.

    `checkpoint` is written every `every` documents, atomically, and removed by the caller once its result is safe. One that is
    there is continued if it belongs to this model, these documents and these settings; otherwise it is replaced, which is logged.
    Raises ScaleError: nothing to learn from, values that are not finite, a folder that cannot be written (before any work).
    """
    if not documents:
        raise ScaleError("calibration got no tokens; give documents with text")
    made_of = identity(engine, documents, sink_tokens)
    collector, done = Collector(FULL, sink_tokens), 0
    if checkpoint.exists():
        found = _resumable(checkpoint, made_of)
        if found is not None:
            collector.stats, done = found.layers, int(found.metadata["done"])
            log.warning("resumed after %d of %d documents, from %s", done, len(documents), checkpoint.name)
    if progress:
        progress(sum(map(len, documents[:done])))
    Statistics(collector.stats, made_of | {"done": done}).save(checkpoint)
    with engine.observe(collector):
        for i, tokens in enumerate(documents[done:], done + 1):
            collector.begin()
            run_document(engine, tokens)
            if i % every == 0 or i == len(documents):
                Statistics(collector.stats, made_of | {"done": i}).save(checkpoint)
            if progress:
                progress(len(tokens))
    check_finite(collector.stats, engine.layers)
    return Statistics(collector.stats, provenance(engine, documents, sink_tokens))


def _resumable(checkpoint: Path, made_of: dict[str, object]) -> Statistics | None:
    """The checkpoint if it can be continued; the reason is logged if not."""
    with contextlib.suppress(KeyError, TypeError):
        try:
            found = Statistics.load(checkpoint)
        except ScaleError as error:
            log.warning("starting anew: %s", error)
            return None
        other = [key for key, value in made_of.items() if found.metadata[key] != value]
        if not other and isinstance(found.metadata["done"], int):
            return found
        log.warning("starting anew: %s is of a run with another %s", checkpoint.name, " and ".join(other) or "version")
    return None
