"""What one message says: the parts of its content, and calls of tools, by the conventions of several servers.

Takes: the content of a message. Gives: its texts, tool calls and results of tools. Does not know about: roles, conversations.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from calibration.text.names import plain_name
from calibration.text.values import parsed

_MARKER = re.compile(r"\n?<(image|video|audio)>\n?")
_NO_TEXT = ("image", "video", "audio", "file", "document", "inline_data")  # in the kind or the key of a part that is no text
_TEXTS = ("text", "content", "value", "thinking", "refusal", "parts")
_CALLS = ("tooluse", "toolcall", "functioncall")
_RESULTS = ("toolresult", "functioncalloutput", "functionresponse")
_PARTS = ("text", "inputtext", "outputtext", "imageurl", "inputimage", "image", *_CALLS, *_RESULTS)
_ARGUMENTS = ("arguments", "parameters", "input", "args")
_PARTS_IN_A_STRING = re.compile(r"\s*\[\s*\{\s*['\"](?:type|text|index)['\"]\s*:")


class Said:
    """texts, calls (as templates take them), results (texts of tools), in order. dropped: counts what is no text, by kind."""

    def __init__(self, dropped: Counter[str]) -> None:
        self.texts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[str] = []
        self._dropped = dropped

    def add(self, content: Any) -> None:
        """A text, a part, a list of parts, or null."""
        if isinstance(content, str) and not _PARTS_IN_A_STRING.match(content):
            self._add_text(content)
            return
        content = parsed(content)
        if isinstance(content, list | tuple):
            for part in content:
                self.add(part)
        elif isinstance(content, Mapping):
            self._add_part(content)
        elif content is not None:
            self._add_text(str(content))

    def _add_text(self, text: str) -> None:
        markers = _MARKER.findall(text)
        for kind in markers:
            self._dropped[_title(kind)] += 1
        if markers:
            text = _MARKER.sub("\n", text).strip("\n")
        if text.strip():
            self.texts.append(text)

    def _add_part(self, part: Mapping[str, Any]) -> None:
        kind = plain_name(part.get("type", ""))
        key = next((k for k in _TEXTS if part.get(k) is not None), None)
        wrapped = next((k for k in part if plain_name(k) in ("functioncall", "functionresponse")), None)  # Gemini's
        if wrapped is not None:
            self._add_tool(plain_name(wrapped), part[wrapped])
        elif kind in _CALLS or kind in _RESULTS:
            self._add_tool(kind, part)
        elif no_text := next((w for w in _NO_TEXT if w in kind or any(w in plain_name(k) for k in part)), None):
            self._dropped[_title(no_text)] += 1
        elif key is not None:
            self.add(part[key])
        elif kind:
            self._dropped[f"{part['type']} parts"] += 1
        elif part:
            self.texts.append(json.dumps(part, ensure_ascii=False))  # what a tool returned, as the object it is

    def _add_tool(self, kind: str, part: Mapping[str, Any]) -> None:
        if kind in _CALLS:
            name = part.get("name") or part.get("toolName")
            self.calls += calls({"name": name, "arguments": part.get("input", part.get("arguments", part.get("args", {})))})
            return
        inner = Said(self._dropped)
        inner.add(next((part[k] for k in ("content", "output", "result", "response") if part.get(k) is not None), None))
        self.results += ["\n".join(inner.texts)] if inner.texts else []


def _title(kind: str) -> str:
    return "images" if kind in ("image", "inline_data") else f"{kind} parts"


def is_part(value: Mapping[Any, Any]) -> bool:
    """Whether this is a part of a message rather than a message."""
    return plain_name(value.get("type", "")) in _PARTS


def calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls in the form templates take, arguments as a mapping where they are one; [] if `value` is no call."""
    value = parsed(value)
    found = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, Mapping):
            continue
        function = parsed(call.get("function", call))
        if isinstance(function, str):
            function = {"name": function, "arguments": call.get("arguments", {})}
        key = next((k for k in _ARGUMENTS if k in function), None)
        named = "name" in function or key is not None
        arguments = (function[key] if key is not None else {}) if named else dict(call)
        found.append({"type": "function", "function": {"name": str(function.get("name") or ""), "arguments": parsed(arguments)}})
    return found


def is_calls(value: Any) -> bool:
    """Whether this is a tool call or a list of them, by its keys: a name, arguments, and no description, as definitions have."""
    value = parsed(value)
    some = value if isinstance(value, list) else [value]
    return bool(some) and all(
        isinstance(c, Mapping) and "name" in c and "description" not in c and any(k in c for k in _ARGUMENTS) for c in some
    )
