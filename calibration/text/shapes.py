"""What a row's author meant by its columns: a conversation, a prompt with its answer, or a text. By the names in names.py.

Takes: one row, a mapping. Gives: Read: what it holds and where that was. Does not know about: templates, other rows.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from calibration.text import names
from calibration.text.messages import Message, best, calls, is_calls, is_conversation, messages, transcript, turn
from calibration.text.names import plain_name
from calibration.text.values import is_empty, is_reference, parsed


class Read(NamedTuple):
    """columns: as named in the row. content: messages, or a text. tools: definitions that a template may show."""

    columns: tuple[str, ...]
    content: list[Message] | str
    tools: list[Any]


class _Row:
    """A row by plain names, without its empty cells; remembers which were used."""

    def __init__(self, row: Mapping[Any, Any], dropped: Counter[str]) -> None:
        self._cells = {plain_name(k): (str(k), v) for k, v in reversed(list(row.items())) if not is_empty(v)}
        self.dropped, self.used = dropped, list[str]()

    def find(self, wanted: Sequence[str]) -> str | None:
        return next((name for name in wanted if name in self._cells), None)

    def peek(self, name: str | None) -> Any:
        return self._cells[name][1] if name in self._cells else None

    def take(self, name: str | None) -> Any:
        if name not in self._cells:
            return None
        self.used.append(self._cells[name][0])
        return self._cells[name][1]

    def read(self, content: list[Message] | str) -> Read:
        tools = parsed(self.take(self.find(names.TOOLS))) if isinstance(content, list) else None
        return Read(tuple(self.used), content, tools if isinstance(tools, list) else [])


def shape(row: Mapping[Any, Any], dropped: Counter[str]) -> Read | None:
    """What the row says; None if no column has a name that is known. dropped: counts what is left out, by kind."""
    cells = _Row(row, dropped)
    return _conversation(cells) or _interview(cells) or _prompted(cells) or _text(cells) or _nested(row, dropped)


def speaks(row: Mapping[Any, Any]) -> bool:
    """Whether the row itself, and not something within it, is a conversation or a prompt."""
    cells = _Row(row, Counter())
    return (_conversation(cells) or _interview(cells) or _prompted(cells)) is not None


def chosen(row: Mapping[Any, Any], columns: Sequence[str], dropped: Counter[str]) -> Read | None:
    """What the columns that somebody named say: one as it is; of several the last is the answer to those before it."""
    values = [(c, _at(row, c)) for c in columns]
    present = [(c, v) for c, v in values if not is_empty(v)]
    used = tuple(c for c, _ in present)
    if not present:
        return None
    if len(columns) == 1:
        value = present[0][1]
        if isinstance(value, str) and not is_conversation(value):
            return Read(used, value, [])
        paragraphs = None if plain_name(columns[0]) in names.CONVERSATION else _joined_texts(value)
        return Read(used, paragraphs or messages(value, "user", dropped), [])
    *asked, (last, answer) = present
    turns = [m for c, v in asked if plain_name(c) in names.SYSTEM for m in messages(v, "system", dropped)]
    turns += _merged([m for c, v in asked if plain_name(c) not in names.SYSTEM for m in messages(v, "user", dropped)])
    turns += messages(answer, "assistant" if last == columns[-1] else "user", dropped)
    return Read(used, turns, [])


def _at(row: Mapping[Any, Any], column: str) -> Any:
    """The cell of a column, or of a path like body.text within one."""
    value: Any = row
    if column in row:
        return row[column]
    for key in column.split("."):
        value = parsed(value.get(key)) if isinstance(value, Mapping) else None
    return value


def _conversation(cells: _Row) -> Read | None:
    for name in names.CONVERSATION:
        value = cells.peek(name)
        if value is None or not is_conversation(value) or (name in names.ONLY_MESSAGES and _joined_texts(value)):
            continue
        turns = messages(cells.take(name), "user", cells.dropped)
        if not turns:
            continue
        if turns[-1]["role"] != "assistant":
            turns += _answer(cells)
        about = [turn("user", t) for n in names.ABOUT if n != "input" and (t := all_text(cells.take(n)))]
        return cells.read(_with_system(cells, _merged(about + turns) if about else turns))
    return None


def _interview(cells: _Row) -> Read | None:
    """Questions about a text, and their answers, each in a list of its own."""
    asks, answers = cells.find(names.QUESTIONS_IN_A_ROW), cells.find(names.ANSWER)
    if asks is None or answers is None:
        return None
    asked, said = parsed(cells.peek(asks)), parsed(cells.peek(answers))
    if isinstance(said, Mapping):  # CoQA: {"input_text": [...], "answer_start": [...]}
        said = next((v for v in said.values() if isinstance(v, list) and v and isinstance(v[0], str)), None)
    if not isinstance(asked, list) or not isinstance(said, list) or len(asked) != len(said):
        return None
    cells.take(asks), cells.take(answers)
    turns = [m for pair in zip(asked, said, strict=True) for m in (turn("user", str(pair[0])), turn("assistant", str(pair[1])))]
    about = [turn("user", t) for n in names.ABOUT if (t := all_text(cells.take(n)))]
    return cells.read(_with_system(cells, _merged(about + turns)))


def _prompted(cells: _Row) -> Read | None:
    """A prompt with its answer, or preference pairs, with what the prompt is about, a system prompt and earlier turns."""
    answered, asks = cells.find(names.ANSWER), cells.find(names.PROMPT)
    if asks is None and cells.find(names.HISTORY):
        asks = "history"
    if asks is None or (answered is None and asks not in names.PROMPT_ALONE):
        if answered in names.PREFERRED and is_conversation(cells.peek(answered)):
            return cells.read(_with_system(cells, _answer(cells)))
        return None
    if answered is None and cells.find(names.TEXT) and not cells.find((*names.ABOUT, *names.OPTIONS)):
        return None  # a text that carries a prompt's column along
    earlier = messages(cells.take("history"), "user", cells.dropped) if asks != "history" else []
    raw = parsed(cells.take(asks))
    question = messages(raw, "user", cells.dropped)
    if all(m["role"] == "user" for m in question):
        question = _merged(_with_what_it_is_about(cells, asks, question))
    answer = _answer(cells)
    if any(m["role"] == "user" for m in answer):  # the answer is the whole conversation, the prompt included
        question = [m for m in question if m["role"] == "system" and m not in answer]
    if isinstance(raw, str) and len(answer) == 1 and "tool_calls" not in answer[0]:
        said = answer[0]["content"]
        if len(said) > len(raw) and said.startswith(raw):
            answer = [turn("assistant", said[len(raw) :].strip())]
        elif _continues(raw, said) and not earlier:
            return cells.read(raw + said)
        else:
            answer = [turn("assistant", said.strip())]
    return cells.read(_with_system(cells, earlier + question + answer))


def _continues(prompt: str, answer: str) -> bool:
    """A text cut in two, as "The sky is" and " blue.": the second part begins with its own space."""
    return answer[:1] == " " and not transcript(prompt) and not prompt.rstrip().endswith((".", "?", "!", ":"))


def _with_what_it_is_about(cells: _Row, asks: str, question: list[Message]) -> list[Message]:
    texts = [turn("user", text) for n in names.ABOUT if n != asks and (text := all_text(cells.take(n)))]
    options = cells.find(names.OPTIONS)
    if options is not None:
        listed = _options(cells.take(options))
        question = (
            [*question, turn("user", "\n".join(f"{label}. {text}" for label, text in listed.items()))] if listed else question
        )
    return texts + question if asks in names.QUESTIONS else question + texts


def _answer(cells: _Row) -> list[Message]:
    """The assistant's turn: of several answers the best; an option in full; tool calls as such. The rejected one is counted."""
    if cells.find(names.REJECTED):
        cells.dropped["rejected answers"] += 1
    name = cells.find(names.ANSWER)
    if name is None:
        return []
    value = parsed(cells.take(name))
    if isinstance(value, list) and value and is_calls(value):
        return [{"role": "assistant", "content": "", "tool_calls": calls(value)}]
    if isinstance(value, list) and name in names.SEVERAL:
        cells.dropped["further answers"] += len(value) - 1
        value = best(value)
    options = cells.find(names.OPTIONS)
    if options is not None and isinstance(value, int | str):
        value = _option(_options(cells.peek(options)), value)
    found = messages(value, "assistant", cells.dropped)
    return [turn("assistant", found[0]["content"])] if len(found) == 1 and isinstance(value, str) else found


def _options(value: Any) -> dict[str, str]:
    """{"A": text, ...} of a list of options, of {"text": [...], "label": [...]} or of a mapping of labels to texts."""
    value = parsed(value)
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        labels = value.get("label") or [chr(65 + i) for i in range(len(value["text"]))]
        return dict(zip(map(str, labels), map(str, value["text"]), strict=False))
    if isinstance(value, Mapping):
        return {str(k): str(v) for k, v in value.items()}
    if isinstance(value, list):
        return {chr(65 + i): all_text(v) or str(v) for i, v in enumerate(value)}
    return {}


def _option(options: dict[str, str], value: int | str) -> Any:
    """The option meant by a number from 0 on or by a label; other answers as they are."""
    texts = list(options.items())
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(texts):
        return f"{texts[value][0]}. {texts[value][1]}"
    return f"{value}. {options[value]}" if isinstance(value, str) and value in options else value


def _text(cells: _Row) -> Read | None:
    for name in (*names.TEXT, *names.ANSWER):
        value = cells.peek(name)
        text = value if isinstance(value, str) else _joined_texts(value)
        if text and not is_reference(text):
            cells.take(name)
            return cells.read((transcript(text) if "###" in text else []) or text)
    return None


def _nested(row: Mapping[Any, Any], dropped: Counter[str]) -> Read | None:
    """Columns within a column, like the body of a logged request, or lists of rows within a row."""
    found: list[tuple[str, Read]] = []
    for key, value in row.items():
        value = parsed(value)
        inner = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, Mapping)]
        found += [(str(key), read) for v in inner if (read := shape(v, dropped)) is not None]
    if not found:
        return None
    used, contents = tuple(dict.fromkeys(key for key, _ in found)), [read.content for _, read in found]
    if any(isinstance(content, str) for content in contents):
        texts = [content if isinstance(content, str) else "\n\n".join(m["content"] for m in content) for content in contents]
        return Read(used, "\n\n".join(texts), [])
    return Read(used, [m for content in contents if not isinstance(content, str) for m in content], [])


def _with_system(cells: _Row, turns: list[Message]) -> list[Message]:
    name = cells.find(names.SYSTEM)
    if name is None or any(m["role"] == "system" for m in turns):
        return turns
    said = messages(cells.take(name), "system", cells.dropped)
    return [m | {"content": re.sub(r"^SYSTEM:\s*", "", m["content"])} for m in said] + turns


def _merged(turns: list[Message]) -> list[Message]:
    """Turns of one speaker in a row as one."""
    out: list[Message] = []
    for m in turns:
        if out and out[-1]["role"] == m["role"] and "tool_calls" not in m and "tool_calls" not in out[-1]:
            out[-1] = out[-1] | {"content": out[-1]["content"] + "\n\n" + m["content"]}
        else:
            out.append(m)
    return out


def _joined_texts(value: Any) -> str | None:
    """Paragraphs as one text; None for anything else than a list of texts."""
    value = parsed(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        return "\n\n".join(v for v in value if v.strip())
    return None


def all_text(value: Any) -> str:
    """Every text in a cell, whatever its form, one paragraph each."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return "\n\n".join(t for v in value if (t := all_text(v)))
    return ""
