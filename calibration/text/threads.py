"""Conversations that are stored one post a row, each with the id of the post it answers, as OpenAssistant's are.

Takes: rows. Gives: one row of messages for each first post. Does not know about: templates, columns of other shapes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_ID, _PARENT = ("message_id", "id", "post_id"), ("parent_id", "parent", "reply_to", "in_reply_to")
_TEXT, _ROLE = ("text", "content", "body"), ("role", "from", "author")


def are_posts(rows: Sequence[Any]) -> bool:
    """Whether these rows are posts that refer to each other."""
    maps = [r for r in rows if isinstance(r, Mapping)]
    if not maps or not all(_of(r, _ID) and _of(r, _TEXT) for r in maps):
        return False
    ids = {str(r[_of(r, _ID)]) for r in maps}
    return any(str(r.get(_of(r, _PARENT))) in ids for r in maps if _of(r, _PARENT))


def threads(rows: Iterable[Any], dropped: Counter[str]) -> Iterator[Any]:
    """{"messages": [...]} of every first post, in order: it, its best answer, the best answer to that, and so on.

    Other answers are counted in `dropped`. What is no post is passed on as it is, first.
    """
    first: list[Any] = []
    answers: dict[str, list[Any]] = defaultdict(list)
    posts = {}
    for row in rows:
        key = _of(row, _ID) if isinstance(row, Mapping) else None
        if key is None:
            yield row
            continue
        posts[str(row[key])] = row
    for row in posts.values():
        parent = str(row.get(_of(row, _PARENT) or "", ""))
        (answers[parent] if parent in posts else first).append(row)
    for row in first:
        path, seen = [row], 0
        while following := answers.get(str(path[-1][_of(path[-1], _ID)])):
            seen += len(following) - 1
            path.append(min(following, key=lambda r: r["rank"] if isinstance(r.get("rank"), int | float) else 1e9))
        dropped["answers beside the best one"] += seen
        yield {"messages": [{"role": _role(r, i), "content": r.get(_of(r, _TEXT) or "")} for i, r in enumerate(path)]}


def _role(row: Mapping[str, Any], index: int) -> str:
    return str(row.get(_of(row, _ROLE) or "") or ("user", "assistant")[index % 2])


def _of(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((n for n in names if row.get(n) is not None), None)
