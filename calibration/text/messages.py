"""Whatever stands for turns of a conversation, as messages in the one form that chat templates take.

Takes: lists of messages by any public convention, pairs, transcripts, replies of a server. Gives: {"role", "content" (a string),
"tool_calls"?}. Does not know about: columns, templates, tokens.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from calibration.text.names import CONTENT_KEYS, NESTED, REASONING_KEYS, ROLE_KEYS, ROLES, SCORES, SYSTEM, plain_name
from calibration.text.parts import Said, calls, is_calls, is_part
from calibration.text.values import is_empty, parsed, without_nulls

Message = dict[str, Any]
Dropped = Counter[str]

_SPEAKER = r"(?:#+\s*)?(Human|User|Assistant|System|AI|Bot|Customer|Agent|FUNCTION RESPONSE|Instruction|Response|GPT)\s*:[ \t]*"
_TURN = re.compile(rf"(?:^|\n)[ \t]*{_SPEAKER}|(?=###)###\s*(Human|Assistant)\s*:[ \t]*", re.IGNORECASE)
_ASKS = ("human", "user", "input", "question", "instruction", "prompt", "q")  # keys of the two turns of a pair
_ANSWERS = ("assistant", "bot", "gpt", "output", "answer", "response", "a", "answers")


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def messages(value: Any, role: str, dropped: Dropped) -> list[Message]:
    """The turns in `value`, in order; [] if it holds none. role: of a text that does not say who speaks."""
    value = without_nulls(parsed(value))
    if is_empty(value):
        return []
    if isinstance(value, str):
        return transcript(value) or [turn(role, value)]
    if isinstance(value, bool):
        return [turn(role, "yes" if value else "no")]
    if isinstance(value, int | float):
        return [turn(role, str(value))]
    if isinstance(value, Mapping):
        return _of_mapping(value, role, dropped)
    return _of_list(list(value), role, dropped) if isinstance(value, Sequence) and not isinstance(value, bytes) else []


def is_conversation(value: Any) -> bool:
    """Whether a cell holds turns by its form: a list of messages, of pairs or of texts, or a transcript."""
    value = parsed(value)
    if isinstance(value, str):
        return bool(transcript(value))
    if isinstance(value, Mapping):
        nested = any(_key(value, (k,)) is not None for k in NESTED)
        return nested or _columns(value) is not None or _is_tree(value) or (bool(value) and all(map(_is_pair, value.values())))
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        return False
    return all(isinstance(m, str) for m in value) or any(_is_message(m) or _is_pair(m) for m in value)


def transcript(text: str) -> list[Message]:
    """The turns of a text like "Human: ...\\n\\nAssistant: ..." that begins with a speaker and has an assistant; else []."""
    found = list(_TURN.finditer(text))
    if not found or text[: found[0].start()].strip():
        return []
    ends = [m.start() for m in found[1:]] + [len(text)]
    turns = []
    for m, end in zip(found, ends, strict=True):
        said = text[m.end() : end].replace("<|endoftext|>", "").strip()
        turns.append(turn(_role(m[1] or m[2]), said))
    if not any(t["role"] == "assistant" for t in turns):
        return []
    return [t for t in turns if t["content"]]


def best(answers: Sequence[Any]) -> Any:
    """Of several answers to one prompt: the one ranked or scored best, else the first."""
    ranked = [a for a in answers if isinstance(a, Mapping)]
    if not ranked or len(ranked) < len(answers):
        return answers[0]
    if all(isinstance(a.get("rank"), int | float) for a in ranked):
        return min(ranked, key=lambda a: a["rank"])
    for key in SCORES:
        if all(isinstance(a.get(key), int | float) for a in ranked):
            return max(ranked, key=lambda a: a[key])
    return answers[0]


def _of_mapping(value: Mapping[Any, Any], role: str, dropped: Dropped) -> list[Message]:
    if is_calls(value):
        return [{"role": "assistant", "content": "", "tool_calls": calls(value)}]
    columns = _columns(value)
    if columns is not None:
        return _of_list(columns, role, dropped)
    if _is_tree(value):
        return _of_list(_last_branch(value), role, dropped)
    if "replies" in value:
        following = value["replies"]
        rest = messages(best(following), role, dropped) if isinstance(following, list) and following else []
        return _message({k: v for k, v in value.items() if k != "replies"}, role, dropped) + rest
    if _is_message(value):
        return _message(value, role, dropped)
    if _is_pair(value):
        return _of_pair(value, dropped)
    key = _key(value, NESTED)
    if key is not None:
        inner = parsed(value[key])
        return messages(inner[0] if plain_name(key) == "choices" and isinstance(inner, list) and inner else inner, role, dropped)
    content = _key(value, (*CONTENT_KEYS, "answer"))
    if content is not None:
        inner = value[content]  # SQuAD's {"text": [...]}: alternatives
        return messages(inner[0] if isinstance(inner, list) and inner and isinstance(inner[0], str) else inner, role, dropped)
    if value and all(is_conversation(v) or _is_pair(v) for v in value.values()):  # turns by number
        return [m for v in value.values() for m in messages(v, role, dropped)]
    return []


def _of_list(items: list[Any], role: str, dropped: Dropped) -> list[Message]:
    if is_calls(items):
        return [{"role": "assistant", "content": "", "tool_calls": calls(items)}]
    if any(isinstance(i, Mapping) and is_part(i) for i in items):
        return _message({"role": role, "content": items}, role, dropped)
    out: list[Message] = []
    for item in items:
        if isinstance(item, str):
            named = re.match(rf"\s*{_SPEAKER}", item, re.IGNORECASE)
            speaker = _role(named[1]) if named else ("assistant" if out and out[-1]["role"] == "user" else "user")
            said = item[named.end() :] if named else item
            out += [turn(speaker, said)] if said.strip() else []
        elif isinstance(item, Mapping):
            out += _of_mapping(item, role, dropped)
        elif _is_pair(item):
            out += [turn(who, said) for who, said in zip(("user", "assistant"), item, strict=True) if said and said.strip()]
    return _two_speakers(out)


def _of_pair(value: Mapping[Any, Any], dropped: Dropped) -> list[Message]:
    out = []
    for names, role in ((SYSTEM, "system"), (_ASKS, "user"), (_ANSWERS, "assistant")):
        key = _key(value, names)
        if key is None and role == "assistant":
            key = next((k for k in value if plain_name(k) not in (*SYSTEM, *_ASKS)), None)
        if key is not None:
            said = parsed(value[key])
            alternatives = plain_name(key) == "answers" and isinstance(said, list) and said
            out += messages(best(said) if alternatives else said, role, dropped)
    return out


def _message(value: Mapping[Any, Any], role: str, dropped: Dropped) -> list[Message]:
    """One message; what its parts say apart from it, the results of tools, become messages before it."""
    speaker = _speaker(value) or role
    key = _key(value, CONTENT_KEYS)
    content = value[key] if key is not None else None
    if isinstance(content, Mapping) and _key(content, ("content",)) is not None:  # LangChain: {"type": "human", "data": {...}}
        content = content[_key(content, ("content",))]
    said = Said(dropped)
    for name in REASONING_KEYS:
        said.add(value.get(name))
    said.add(content)
    for name in ("tool_calls", "function_call"):
        said.calls += calls(value[name]) if value.get(name) else []
    text = "\n".join(said.texts)
    if plain_name(speaker) == "functioncall" and is_calls(text):
        said.calls, text = calls(text), ""
    before = [turn("tool", result) for result in said.results]
    if not text.strip() and not said.calls:
        dropped["empty turns"] += not before
        return before
    message: Message = turn(_role(speaker), text)
    if said.calls:
        message["tool_calls"] = said.calls
    if message["role"] == "tool" and isinstance(value.get("name"), str):
        message["name"] = value["name"]
    return [*before, message]


def _columns(value: Mapping[Any, Any]) -> list[Any] | None:
    """Messages given as lists of roles and of contents, as messages; None if `value` is something else."""
    role, content = _key(value, ROLE_KEYS), _key(value, CONTENT_KEYS)
    if role is None or content is None or not isinstance(value[role], list) or not isinstance(value[content], list):
        return None
    if len(value[role]) != len(value[content]) or not all(isinstance(r, str) for r in value[role]):
        return None
    return [{"role": r, "content": c} for r, c in zip(value[role], value[content], strict=True)]


def _is_tree(value: Mapping[Any, Any]) -> bool:
    """ChatGPT's export: {id: {"message", "parent", "children"}}."""
    return bool(value) and all(isinstance(v, Mapping) and "children" in v for v in value.values())


def _last_branch(tree: Mapping[Any, Any]) -> list[Any]:
    """The messages from the root to the newest leaf."""
    node = next((k for k, v in tree.items() if not isinstance(v.get("parent"), str) or v["parent"] not in tree), None)
    path: list[Any] = []
    while node in tree and len(path) <= len(tree):
        path.append(tree[node].get("message"))
        node = (tree[node]["children"] or [None])[-1]
    return [m for m in path if m]


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and _speaker(value) is not None
        and (_key(value, (*CONTENT_KEYS, "toolcalls", "functioncall")) is not None)
    )


def _is_pair(value: Any) -> bool:
    if isinstance(value, Mapping):
        asks = _key(value, _ASKS)
        return asks is not None and (
            _key(value, _ANSWERS) is not None or (len(value) == 2 and all(isinstance(v, str) for v in value.values()))
        )
    two = isinstance(value, list | tuple) and len(value) == 2
    return two and all(v is None or isinstance(v, str) for v in value) and any(value)


def _speaker(value: Mapping[Any, Any]) -> str | None:
    for key in ROLE_KEYS:
        said = value.get(key)
        if isinstance(said, Mapping):  # {"author": {"role": "user"}}
            said = said.get("role", said.get("name"))
        if isinstance(said, str) and said.strip() and (key != "type" or plain_name(said) in ROLES):
            return said
    return None


def _role(name: str) -> str:
    return ROLES.get(plain_name(name), name)


def _two_speakers(turns: list[Message]) -> list[Message]:
    """People by name: the first to speak is the user, the other the assistant."""
    known = set(ROLES.values())
    names = list(dict.fromkeys(t["role"] for t in turns if t["role"] not in known))
    if names and len(names) <= 2 and not any(t["role"] in ("user", "assistant") for t in turns):
        given = dict(zip(names, ("user", "assistant"), strict=False))
        return [t | {"role": given.get(t["role"], t["role"])} for t in turns]
    return turns


def _key(value: Mapping[Any, Any], names: Sequence[str]) -> Any:
    """The first of `names` that `value` has, as it is written there, with something in it; None if there is none."""
    have = {plain_name(key): key for key in reversed(value) if value[key] is not None}
    return next((have[plain_name(name)] for name in names if plain_name(name) in have), None)
