"""How long a run will take on this machine, said beforehand: as long as it took here before, or what short forwards suggest.

Takes: a run, a loaded model, the tokens that will be read, written and scored. Gives: a line for people.
Does not know about: what is measured, or in which order.
"""

import json
import time
from dataclasses import dataclass

from experiments.harness.base import Run
from experiments.harness.record import plain
from experiments.measuring import engines
from qkv.models import LoadedModel
from qkv.types import SamplingParams

_TOKENS = 64  # of each prompt of the short forwards


@dataclass(frozen=True)
class Work:
    """Tokens of a whole run. batch: requests that are read and written at once."""

    read: int
    written: int
    scored: int
    batch: int


def line(run: Run, loaded: LoadedModel, work: Work) -> str:
    """Some seconds of measuring, unless this very run has ended well on this machine before."""
    if (before := remembered(run)) is not None:
        return f"This takes {rounded(before)} on this machine: as long as the last time ({before:,.0f} s)."
    return f"This takes {rounded(estimated(run, loaded, work))} on this machine, by an estimate from a few short forwards."


def remembered(run: Run) -> float | None:
    """Seconds of the latest run of the same settings on the same machine whose record lies beside this one's."""
    here, took = run.record.data, dict[str, float]()
    for path in run.folder.parent.glob("*/record.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            alike = record["config"] == plain(here["config"]) and record["host"] == plain(here["host"])
            if alike and record.get("finished"):
                took[record["started"]] = float(record["wall_s"])
        except (OSError, ValueError, KeyError, TypeError):  # of another version, or cut short
            continue
    return took[max(took)] if took else None


def estimated(run: Run, loaded: LoadedModel, work: Work) -> float:
    """Seconds, from the rates at which the unquantized model reads, writes and scores a few tokens."""
    prompts = [[1 + (i * 31 + j) % 97 for j in range(_TOKENS)] for i in range(work.batch)]
    engine = engines.build(engines.small(run.engine, work.batch, _TOKENS + 4), loaded, "none")
    try:
        engines.generate(engine, prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True))
        engine.reset_metrics()
        engines.generate(engine, prompts, SamplingParams(max_tokens=4, ignore_eos=True))
        speed = engine.metrics()["speed"]
        began = time.perf_counter()
        engine.score(prompts[:1], first=1)
        scoring = _TOKENS / (time.perf_counter() - began)
    finally:
        engine.close()
    return work.read / speed["prefill_tokens_per_s"] + work.written / speed["decode_tokens_per_s"] + work.scored / scoring


def rounded(seconds: float) -> str:
    """'about 40 seconds', 'about 3 minutes': no more digits than an estimate has."""
    if seconds < 90:
        return f"about {max(10, 10 * round(seconds / 10))} seconds"
    return f"about {round(seconds / 60)} minutes"
