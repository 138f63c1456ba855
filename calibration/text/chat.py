"""Conversations through the model's chat template; in plain words where the template has no place for something.

Takes: messages as messages.py gives them, a tokenizer. Gives: text. Does not know about: rows, columns.
"""

import json
from collections import Counter
from functools import cached_property
from typing import Any

from calibration.text.messages import Message, turn

_PROBE_CALL = [
    turn("user", "u"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "probe_call", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "name": "probe_call", "content": "probe_result"},
    turn("assistant", "x"),
]
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {"name": "probe_tool", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]


class Chat:
    """Renders conversations. repaired, dropped: counters of what had to be done and of what was left out."""

    def __init__(self, tokenizer: Any, repaired: Counter[str], dropped: Counter[str]) -> None:
        self._tokenizer, self._repaired, self._dropped = tokenizer, repaired, dropped

    @cached_property
    def _shows_calls(self) -> bool:
        """Whether the template has a place for tool calls and results."""
        return _shows(self._render(_PROBE_CALL, []), "probe_call", "probe_result")

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether it has one for definitions of tools."""
        return _shows(self._render([turn("user", "u")], _PROBE_TOOLS), "probe_tool")

    def text(self, messages: list[Message], tools: list[Any]) -> str:
        """The conversation as the model would read it; without a template, its turns one after the other."""
        plain = written_out(messages, tools)
        if not getattr(self._tokenizer, "chat_template", None):
            return _joined(plain)
        attempts: list[tuple[list[Message], list[Any]]] = [(plain, []), (_alternating(plain), [])]
        if self._shows_calls or not any(m.get("tool_calls") or m["role"] == "tool" for m in messages):
            beside = tools and self._shows_tools
            attempts.insert(0, (messages, tools) if beside else (_with_tools(messages, tools), []))
        for said, definitions in attempts:
            rendered = self._render(said, definitions)
            if rendered is not None:
                self._repaired["conversations with turns merged for the chat template"] += said is attempts[-1][0]
                left_out = sum(m["content"].strip() not in rendered for m in said)
                self._dropped["turns that the chat template leaves out"] += left_out
                return rendered
        self._repaired["messages joined without the chat template, which refused them"] += 1
        return _joined(plain)

    def _render(self, messages: list[Message], tools: list[Any]) -> str | None:
        try:
            extra = {"tools": tools} if tools else {}
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **extra))
        except Exception:  # templates raise their own kinds: unknown roles, turns that do not alternate
            return None


def written_out(messages: list[Message], tools: list[Any]) -> list[Message]:
    """The same with tool calls and tool definitions as JSON in the text, in the tags that most models use."""
    out = []
    for m in _with_tools(messages, tools):
        called = [json.dumps(call["function"], ensure_ascii=False) for call in m.get("tool_calls", [])]
        tagged = [f"<tool_call>\n{call}\n</tool_call>" for call in called]
        out.append(turn(m["role"], "\n".join([*([m["content"]] if m["content"].strip() else []), *tagged])))
    return out


def _with_tools(messages: list[Message], tools: list[Any]) -> list[Message]:
    """Tool definitions as JSON at the end of the system turn, which is added where there is none."""
    if not tools:
        return messages
    listed = "Tools:\n" + "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
    if messages and messages[0]["role"] == "system":
        return [turn("system", f"{messages[0]['content']}\n\n{listed}"), *messages[1:]]
    return [turn("system", listed), *messages]


def _alternating(messages: list[Message]) -> list[Message]:
    """User and assistant in turn, for templates that know nothing else: what the system and tools say is said by the user."""
    out: list[Message] = []
    for m in messages:
        role = "assistant" if m["role"] == "assistant" else "user"
        if out and out[-1]["role"] == role:
            out[-1] = turn(role, f"{out[-1]['content']}\n\n{m['content']}")
        else:
            out.append(turn(role, m["content"]))
    return out


def _shows(rendered: str | None, *words: str) -> bool:
    return rendered is not None and all(word in rendered for word in words)


def _joined(messages: list[Message]) -> str:
    return "\n\n".join(m["content"] for m in messages)
