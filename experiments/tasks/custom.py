"""Makes an lm-eval task of your own JSON lines: multiple choice, question and reference, or plain text for perplexity.

    lm-eval --include_path conf/tasks --tasks custom --metadata '{"custom": {"path": "mine.jsonl"}}' ...

Takes: a file in which all lines have the same one of the three sets of keys in KINDS. Gives: a task. A line that cannot be used
ends the run with a message that has its number, because the scores of half a file are not the file's scores.
Does not know about: models.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask

from experiments.tasks.text import test_split
from qkv.errors import ConfigError

_SHOWN = 5  # one message names at most so many bad lines
_MEAN: dict[str, Any] = {"aggregation": "mean", "higher_is_better": True}
KINDS: dict[str, tuple[str, ...]] = {
    "choice": ("question", "choices", "answer"),
    "prompt": ("prompt", "reference"),
    "text": ("text",),
}


class Custom(ConfigurableTask):
    """The task of conf/tasks/custom.yaml (`task: custom`). config: what lm-eval read there, with `metadata.custom.path`."""

    def __init__(self, config: dict[str, Any]) -> None:
        settings = (config.get("metadata") or {}).get("custom") or {}
        if not isinstance(settings, Mapping) or not settings.get("path"):
            raise ConfigError("task.custom.path is needed: the JSON-lines file to make a task of")
        kind, rows = read(Path(str(settings["path"])))
        config = {key: value for key, value in config.items() if key != "class"}
        super().__init__(config=config | _TASKS[kind](rows) | {"custom_dataset": lambda **_: test_split(rows)})


def read(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The kind of the file's lines, and the lines. Blank lines are skipped. Raises ConfigError that names the unusable lines."""
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        raise ConfigError(f"task.custom.path: '{path}' is not a file")
    rows: list[dict[str, Any]] = []
    bad: list[str] = []
    kind = ""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            try:
                own, row = _row(line)
                kind = kind or own
                if own != kind:
                    raise ValueError(f"has {', '.join(KINDS[own])} where the first line has {', '.join(KINDS[kind])}")
                rows.append(row)
            except ValueError as error:
                bad.append(f"line {number} {error}")
    if bad:
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ConfigError(f"task.custom.path: {path}: {len(bad)} unusable lines: {'; '.join(bad[:_SHOWN])}{more}")
    if not rows:
        raise ConfigError(f"task.custom.path: {path} is empty")
    return kind, rows


def _row(line: bytes) -> tuple[str, dict[str, Any]]:
    """The kind and the columns of one line. Raises ValueError, with a text that continues 'line 7'."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {line[error.start]:#04x} at {error.start + 1})") from None
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    kind = next((kind for kind, keys in KINDS.items() if isinstance(row, dict) and set(keys) <= set(row)), None)
    if kind is None:
        raise ValueError(f"needs the keys {', or '.join(', '.join(keys) for keys in KINDS.values())}")
    out = {key: row[key] for key in KINDS[kind]}
    if kind == "choice":
        choices, answer = out["choices"], out["answer"]
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
            raise ValueError("needs two or more choices, none of them empty")
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
            raise ValueError(f"has the answer {answer!r}, which is no index of {len(choices)} choices (0 to {len(choices) - 1})")
    for key in KINDS[kind]:
        if key not in ("choices", "answer") and not (isinstance(out[key], str) and out[key].strip()):
            raise ValueError(f"has an empty {key}")
    return kind, out


def score(doc: Mapping[str, str], results: list[str]) -> dict[str, float]:
    """The scores of an answer. exact: it equals the reference but for surrounding space. contains: the reference is in it."""
    answer, reference = results[0].strip(), doc["reference"].strip()
    return {"exact": float(answer == reference), "contains": float(reference in answer)}


def _choice(_rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"} | _MEAN, {"metric": "acc_norm"} | _MEAN],
    }


def _prompt(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How documents of question and reference are asked. An answer ends where its line ends, unless a reference has several
    lines, and may be twice as long as the longest reference."""
    references = [row["reference"].strip() for row in rows]
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{reference}}",
        "process_results": score,
        "generation_kwargs": {
            "until": ["\n\n\n"] if any("\n" in text for text in references) else ["\n"],
            "do_sample": False,
            "max_gen_toks": min(512, 8 + max(map(len, references))),
        },
        "metric_list": [{"metric": "exact"} | _MEAN, {"metric": "contains"} | _MEAN],
    }


def _text(_rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }


_TASKS: dict[str, Callable[[list[dict[str, Any]]], dict[str, Any]]] = {"choice": _choice, "prompt": _prompt, "text": _text}
