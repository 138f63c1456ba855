"""Compares a quantizer's scores with the baseline's on the same samples: a task's entry in a row, and the samples that flipped.

Takes: Scores of two runs. Gives: plain numbers, words and lists. Does not know about: engines, files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lm.evaluate import Scores
from experiments.measuring import significance

_PROMPT_END = 200  # so many last characters of a flipped sample's prompt are listed


def entry(scores: Scores, facts: Mapping[str, Any], least_read: float, reads: str) -> dict[str, Any]:
    """The keys of a task's entry that need no comparison. facts: what evaluate.run measured of the engine. least_read: the share
    of keys that attention must have read as stored for the score to say something about the quantizer. reads: the setting
    attention.reads."""
    fraction = facts["fraction_read_from_cache"]
    return {
        "metric": scores.metric,
        "value": scores.value,
        "stderr": scores.stderr,
        "unit": scores.unit,
        "samples": len(scores.samples),
        "fraction_read_from_cache": fraction,
        "read_through_cache": reads == "cache" and fraction is not None and fraction >= least_read,
        **{key: facts[key] for key in ("seconds", "prefill_tokens", "scored_tokens", "generated_tokens", "hit_rate")},
        **{key: facts[key] for key in ("truncated_requests", "truncated_tokens")},
    }


def against(base: Scores, other: Scores, seed: int, comparisons: int) -> tuple[dict[str, Any], significance.Paired]:
    """The keys of a task's entry that compare it with the baseline's, and the test. comparisons: how many comparisons share one
    error probability.

    Raises RuntimeError if the two runs did not see the same prompts, since then nothing can be compared.
    """
    for a, b in zip(base.samples, other.samples, strict=True):
        if (a.id, a.prompt, a.target) != (b.id, b.prompt, b.target):
            raise RuntimeError(
                f"sample {a.id} had another prompt in the baseline's run; the task does not repeat its own prompts"
            )
    binary = base.binary and other.binary
    paired = significance.paired(
        [s.score for s in base.samples], [s.score for s in other.samples], binary=binary, seed=seed, comparisons=comparisons
    )
    moves = [b.score - a.score for a, b in zip(base.samples, other.samples, strict=True)]
    return {
        "baseline": base.value,
        "delta": other.value - base.value,
        "p_value": paired.p_value,
        "test": "McNemar, exact" if binary else "paired bootstrap",
        "paired_delta": paired.delta,
        "paired_delta_stderr": paired.stderr,
        "minimum_detectable_effect": paired.mde,
        "lost": sum(m < 0 for m in moves),
        "gained": sum(m > 0 for m in moves),
        "answers_changed": sum(a.answer != b.answer for a, b in zip(base.samples, other.samples, strict=True)),
    }, paired


def flips(base: Scores, other: Scores, quantizer: str, task: str) -> list[dict[str, Any]]:
    """The samples that only one of two runs answered rightly, the lost ones first. Empty for tasks with other scores than right
    and wrong: those move a little on every sample, so a flip would say nothing."""
    if not (base.binary and other.binary):
        return []
    listed = [
        {
            "quantizer": quantizer,
            "task": task,
            "sample": a.id,
            "flip": "lost" if b.score < a.score else "gained",
            "target": a.target,
            "none_answers": a.answer,
            "quantizer_answers": b.answer,
            "prompt_end": a.prompt[-_PROMPT_END:],
        }
        for a, b in zip(base.samples, other.samples, strict=True)
        if a.score != b.score
    ]
    return sorted(listed, key=lambda flip: flip["flip"] != "lost")


def judge(tasks: Sequence[tuple[dict[str, Any], significance.Paired]], comparisons: int) -> None:
    """Set "p_adjusted" and "verdict" of every entry. The p-values are adjusted (Holm) for all comparisons of the run; those that
    have not run yet count as not significant."""
    if not tasks:
        return
    p_values = [paired.p_value for _, paired in tasks]
    adjusted = significance.holm(p_values + [1.0] * (comparisons - len(p_values)))
    for (task, paired), p in zip(tasks, adjusted, strict=False):
        task["p_adjusted"] = p
        words = significance.verdict(paired, p, task["unit"])
        task["verdict"] = words if task["read_through_cache"] else f"not read through the cache, so says little ({words})"
