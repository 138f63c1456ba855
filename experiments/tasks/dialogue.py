"""A conversation of many turns in which a customer says four things about themselves, and is asked for one of them at the end.

Takes: lm-eval's metadata. Gives: documents. Four of them, one for each thing, share a conversation, and so nearly all of the
prompt. The turns between the four things are a bank's documents, as questions and answers. Earlier answers are given, not
generated, so that every quantizer reads the same text. Does not know about: models.
"""

import random
from collections.abc import Mapping
from typing import Any

import datasets

from experiments.tasks.text import SAMPLES, SEED, documents, sentences, setting, test_split

_NAMES = "Amelia Bruno Chloe Dmitri Elena Farid Grace Hiro Ines Jonas Karim Lucia Mateo Nadia Oscar Priya Ravi Sofia Tomas Yara"
_CITIES = "Athens Boston Cairo Delhi Geneva Havana Lagos Lima Madrid Nairobi Oslo Paris Prague Quito Rome Seoul Tunis Vienna"
_DAYS = "Monday Tuesday Wednesday Thursday Friday"
_FACTS = (  # how the customer says it, how the assistant begins its answer, what it is about
    ("My name is {name}.", "Your name is", "name"),
    ("I moved to {city} last month.", "You moved to", "city"),
    ("You can call me back on {day}.", "I can call you back on", "day"),
    ("My order number is {order}.", "Your order number is", "order"),
)
_QUESTIONS = {
    "name": "What is my name?",
    "city": "Which city did I move to?",
    "day": "On which day can you call me back?",
    "order": "What is my order number?",
}


def conversation(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Documents of a `transcript`, which ends where the last answer begins, and the `value` that answer should have. turns: how
    many turns are between two facts (2)."""
    samples, turns = setting(metadata, "samples", SAMPLES), setting(metadata, "turns", 2, 0)
    chooser, filler = random.Random(SEED), _filler()
    rows: list[dict[str, str]] = []
    while len(rows) < samples:
        values = {
            "name": chooser.choice(_NAMES.split()),
            "city": chooser.choice(_CITIES.split()),
            "day": chooser.choice(_DAYS.split()),
            "order": str(chooser.randrange(10_000, 100_000)),
        }
        facts = chooser.sample(_FACTS, len(_FACTS))
        lines = []
        for said, _, _ in facts:
            lines += ["Customer: " + said.format(**values), "Assistant: Thank you, I have noted that."]
            for title, answer in chooser.sample(filler, turns):
                lines += [f"Customer: What can you tell me about {title}?", f"Assistant: {answer}"]
        rows += [
            {"transcript": "\n".join([*lines, f"Customer: {_QUESTIONS[about]}", f"Assistant: {begins}"]), "value": values[about]}
            for _, begins, about in chooser.sample(_FACTS, len(_FACTS))
        ]
    return test_split(rows[:samples])


def _filler() -> list[tuple[str, str]]:
    """Pairs of a topic and a sentence about it, from the bank's documents."""
    pairs = []
    for text in documents("banking"):
        title, _, content = text.removeprefix("# ").removeprefix("Internal: ").partition(" ## ")
        for sentence in sentences(content)[:2]:
            if 60 <= len(sentence) <= 200 and len(title) < 80 and "#" not in sentence:
                pairs.append((title, sentence))
                break
    return pairs


def score(doc: Mapping[str, str], results: list[str]) -> dict[str, float]:
    """The score of an answer. right: it begins with the value."""
    return {"right": float(results[0].strip().lower().startswith(doc["value"].lower()))}
