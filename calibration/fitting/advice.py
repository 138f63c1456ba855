"""Which data to use next: what the drawn documents and the statistics show to be missing.

Takes: how rows were read, lengths of documents, what diagnose.py found. Gives: lines for people. Every rule is a constant below.
Does not know about: models, files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from calibration.fitting.diagnose import BEYOND
from calibration.text.enough import ENOUGH, shortage
from calibration.text.sample import Sample

GROWING = 0.02  # share of a layer's channels that may still grow on text that was held back
_ONE_KIND = 0.98  # share of the rows from which on there is only one script

Layers = Sequence[Mapping[str, Any]]


def next_data(sample: Sample, limit: int, layers: Layers) -> list[str]:
    """limit: tokens of one document at most. layers: as diagnose() gives them, measured on the documents held back."""
    lengths = [len(d) for d in sample.calibration]
    out = []
    if shortage(sum(lengths)):
        out.append(f"More text: {sum(lengths):,} tokens were used; from {ENOUGH:,} on, more of the same changes little.")
    out.append(_growth(layers) if sample.held_back else "Documents to check on: none were held back (sample.held_back).")
    out.append(_length(sample.cut, lengths, limit))
    out += _kinds(sample)
    out.append(
        "Text of another source: what was held back is of the same one. `python -m calibration.drift scales=... data=...` says "
        "whether the scales hold there."
    )
    return out


def _growth(layers: Layers) -> str:
    """Whether ranges still grow with more data."""
    sides = [
        (e["beyond"][side], e["layer"], name) for e in layers if "beyond" in e for side, name in (("k", "key"), ("v", "value"))
    ]
    worst, layer, name = max(sides, default=(0.0, 0, "key"))
    mean = sum(share for share, *_ in sides) / max(1, len(sides))
    found = (
        f"on documents held back {100 * mean:.1f} % of the channels leave their calibrated range by {100 * BEYOND:g} % or more"
        f" (most in layer {layer}: {100 * worst:.1f} % of the {name} channels)"
    )
    if mean >= GROWING:
        return f"More documents like these: ranges still grow; {found}."
    return f"No more documents like these are needed: {found}."


def _length(cut: int, lengths: Sequence[int], limit: int) -> str:
    longest = max(lengths)
    if cut:
        return (
            f"Longer pieces: {cut:,} documents are longer than {limit:,} tokens, and no position beyond was seen. Set "
            "sample.tokens to the length that you serve."
        )
    return f"Longer documents, if you serve any: the longest has {longest:,} tokens, and no position beyond was seen."


def _kinds(sample: Sample) -> list[str]:
    """What the rows are all alike in: form and script."""
    report, out = sample.report, []
    if report.conversations == 0:
        out.append("Conversations, if you serve chats: every row is plain text, none went through the chat template.")
    elif report.conversations == report.kept:
        out.append("Plain documents, if you serve long prompts or retrieved text: every row is a conversation.")
    for script, count in report.scripts.most_common(1):
        if count >= _ONE_KIND * report.kept:
            out.append(f"Other languages, if you serve any: the rows are all in {script.capitalize()} script.")
    return out
