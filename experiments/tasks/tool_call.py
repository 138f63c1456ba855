"""Structured output: a request in words becomes a tool call in JSON. A lost bracket or digit is a lost call.

Takes: lm-eval's metadata. Gives: documents, and three scores of an answer: it parses, the tool is right, every argument is right.
Does not know about: models.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import datasets

from experiments.tasks.text import SAMPLES, SEED, setting, test_split

_TOOLS = {  # name -> ways to ask for it
    "block_card": (
        "Please block the card ending in {card} of customer {customer}, it was {reason}.",
        "Customer {customer} reports that the card ending in {card} was {reason}. Block it.",
    ),
    "transfer": (
        "Move {amount} {currency} from account {source} to account {target}.",
        "Please send {amount} {currency} to account {target}, out of account {source}.",
    ),
    "book_meeting": (
        "Book a meeting with customer {customer} on {date} for {minutes} minutes.",
        "Customer {customer} would like to come in on {date}, for {minutes} minutes.",
    ),
    "send_statement": (
        "Send the statement of account {source} for the last {months} months to {email}.",
        "{email} needs the last {months} months of account {source}.",
    ),
}
_ARGUMENTS = {
    "block_card": ("customer", "card", "reason"),
    "transfer": ("source", "target", "amount", "currency"),
    "book_meeting": ("customer", "date", "minutes"),
    "send_statement": ("source", "months", "email"),
}
_OPENING = "Turn each request into one tool call, written as JSON.\n\n"


def requests(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Documents of a `prompt`, with `shots` worked requests per tool (2), and the right `call` as JSON."""
    chooser, shots = random.Random(SEED), setting(metadata, "shots", 2)
    rows = []
    for _ in range(setting(metadata, "samples", SAMPLES)):
        examples = [_example(tool, chooser) for tool in _TOOLS for _ in range(shots)]
        chooser.shuffle(examples)
        request, call = _example(chooser.choice(list(_TOOLS)), chooser)
        shown = "\n\n".join(f"Request: {r}\nCall: {c}" for r, c in examples)
        rows.append({"prompt": f"{_OPENING}{shown}\n\nRequest: {request}\nCall:", "call": call})
    return test_split(rows)


def _example(tool: str, chooser: random.Random) -> tuple[str, str]:
    values: dict[str, Any] = {
        "customer": f"C-{chooser.randrange(10_000, 100_000)}",
        "card": f"{chooser.randrange(10_000):04d}",
        "reason": chooser.choice(["stolen", "lost", "damaged"]),
        "source": f"A{chooser.randrange(100_000, 1_000_000)}",
        "target": f"A{chooser.randrange(100_000, 1_000_000)}",
        "amount": chooser.randrange(10, 5_000),
        "currency": chooser.choice(["EUR", "USD", "GBP", "CHF"]),
        "date": f"{chooser.randrange(1, 13):02d}/{chooser.randrange(1, 29):02d}",
        "minutes": chooser.choice([15, 20, 30, 45, 60]),
        "months": chooser.randrange(2, 13),
        "email": f"{chooser.choice(['anna', 'ben', 'carla', 'david'])}.{chooser.choice(['hall', 'ito', 'meyer'])}@example.com",
    }
    call = {"tool": tool, "arguments": {name: values[name] for name in _ARGUMENTS[tool]}}
    return chooser.choice(_TOOLS[tool]).format(**values), json.dumps(call)


def score(doc: Mapping[str, str], results: list[str]) -> dict[str, float]:
    """The scores of an answer. parses: its first line is a JSON object. tool: which also names the right tool. call: and in which
    every argument is right."""
    right = json.loads(doc["call"])
    line = (results[0].strip().splitlines() or [""])[0]
    try:
        call = json.loads(line)
    except (ValueError, RecursionError):
        call = None
    parses = isinstance(call, dict)
    return {
        "parses": float(parses),
        "tool": float(parses and call.get("tool") == right["tool"]),
        "call": float(parses and call == right),
    }
