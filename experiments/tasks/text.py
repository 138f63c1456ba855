"""Prose from installed packages to build tasks from, and what all builders of tasks share.

Takes: names of data sources. Gives: documents of clean sentences, as lists. Does not know about: tasks.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import datasets

from calibration.text.data import DATA
from qkv.errors import ConfigError

SAMPLES = 200  # per task, unless another number is asked for
SEED = 1234
_SENTENCE_END = re.compile(r"(?<=[.!?]) +")


@cache
def documents(*names: str) -> tuple[str, ...]:
    """The English texts of these sources, on one line each, in a fixed random order. Raises ConfigError if not installed."""
    texts = [" ".join(text.split()) for name in names for text in DATA.build({"name": name}).documents()]
    texts = [text for text in texts if sum(map(str.isascii, text)) > 0.98 * len(text)]
    random.Random(SEED).shuffle(texts)
    return tuple(texts)


def sentences(text: str) -> list[str]:
    """The text's sentences, cut at spaces after a full stop, question mark or exclamation mark."""
    return _SENTENCE_END.split(text)


def setting(metadata: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """An integer from lm-eval's `--metadata`. Raises ConfigError."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"metadata.{key}: must be a whole number, at least {least}, got {value!r}")
    return value


def test_split(rows: Sequence[Mapping[str, Any]]) -> dict[str, datasets.Dataset]:
    """The documents in the form that lm-eval expects of a `custom_dataset`."""
    return {"test": datasets.Dataset.from_list([dict(row) for row in rows], split=datasets.Split.TEST)}
