"""Reading tasks of prose: long texts for perplexity, the next passage among four, the last word of a passage.

Takes: lm-eval's metadata. Gives: documents. The prose is that of business and law briefs and of Python's language reference,
which no default calibration uses. Does not know about: models, scoring.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

import datasets

from experiments.tasks.text import SAMPLES, SEED, documents, sentences, setting, test_split

_SOURCES = ("briefs", "pydoc")
_WORD = re.compile(r"[a-z]{4,}")


def long_text(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Documents of a `page`: `samples` pieces of `chars` characters (4,000, which are about 900 tokens), each from one text."""
    chars = setting(metadata, "chars", 4_000, 100)
    pages = [text[i : i + chars] for text in documents(*_SOURCES) for i in range(0, len(text) - chars + 1, chars)]
    random.Random(SEED).shuffle(pages)
    return test_split([{"page": page} for page in pages[: setting(metadata, "samples", SAMPLES)]])


def next_passage(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Documents of a `context`, four `choices` and the index `answer` of the sentence that comes next. The other three choices
    are from other texts.

    The context is whole sentences of at least `chars` characters together (600); all choices have 60 to 200 characters.
    """
    chars, samples = setting(metadata, "chars", 600), setting(metadata, "samples", SAMPLES)
    found = _spread(samples, lambda text: _passages(sentences(text), chars))
    chooser, rows = random.Random(SEED), []
    for i, (context, following) in enumerate(found):
        others = [text for j, (_, text) in enumerate(found) if j != i]
        choices = [following, *chooser.sample(others, 3)]
        chooser.shuffle(choices)
        rows.append({"context": context, "choices": choices, "answer": choices.index(following)})
    return test_split(rows)


def last_word(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Documents of a `context` and the `word` that follows it. The word also occurs earlier in the context, so that reading is
    enough to know it, as in LAMBADA.

    Context and word have at least `chars` characters (600); the word is not among the last 15 of the context.
    """
    chars, samples = setting(metadata, "chars", 600), setting(metadata, "samples", SAMPLES)
    return test_split([{"context": c, "word": w} for c, w in _spread(samples, lambda text: _ending(sentences(text), chars))])


def _spread(samples: int, find: Any) -> list[tuple[str, str]]:
    """The first finding of every text, then the second of every text, and so on, so that few texts are used twice."""
    left: list[Iterator[tuple[str, str]]] = [find(text) for text in documents(*_SOURCES)]
    found: list[tuple[str, str]] = []
    while left and len(found) < samples:
        nexts = [(search, next(search, None)) for search in left]
        left = [search for search, finding in nexts if finding is not None]
        found += [finding for _, finding in nexts if finding is not None]
    return found[:samples]


def _passages(parts: list[str], chars: int) -> Iterator[tuple[str, str]]:
    """Pairs of a context and the sentence after it; no two of them overlap."""
    start = 0
    for i, part in enumerate(parts):
        context = " ".join(parts[start:i])
        if len(context) >= chars:
            if 60 <= len(part) <= 200:
                yield context, part
            start = i + 1


def _ending(parts: list[str], chars: int) -> Iterator[tuple[str, str]]:
    start = 0
    for i in range(len(parts)):
        passage = " ".join(parts[start : i + 1])
        if len(passage) < chars:
            continue
        start = i + 1
        context, _, word = passage.rstrip(".!?").rpartition(" ")
        words = context.split()
        if _WORD.fullmatch(word) and word in words[:-15] and word not in " ".join(words[-15:]):
            yield context, word
