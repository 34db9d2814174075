"""Writes questions as the model reads them: with a label for each option.

Statement: Ada owns a boat.
Is the statement true?
A: true
B: false
Answer with one of the letters in front of the colons, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from string import ascii_uppercase
from typing import Any

import msgspec

from edge.http.errors import BadRequest

Json = dict[str, Any]

_HEADS = {
    "predicate": ("Statement", "Is the statement true?"),
    "choice": ("Question", "Which of these fits best?"),
    "score": ("Question", "Which of these steps, from the lowest to the highest, fits best?"),
}
_END = "Answer with one of the letters in front of the colons, and nothing else."


@dataclass(frozen=True, slots=True)
class Option:
    """One of several, of which the model chooses. `label` stands for it in the answer."""

    name: str
    description: str = ""
    label: str = ""


def labels() -> Iterator[str]:
    """Yields what may stand for options: letters, then pairs of them."""
    pairs = ("".join(pair) for pair in product(ascii_uppercase, repeat=2))
    return chain(ascii_uppercase, pairs)


def question_text(
    kind: str, instructions: str | list[Json], options: Sequence[Option], place: str
) -> str:
    """Returns the text of a question at `place` of the body. Raises `BadRequest`."""
    title, what = _HEADS[kind]
    told = instructions
    if not isinstance(told, str):
        place = f"{place}.instructions"
        told = "\n".join(_text_of(part, f"{place}.{i}") for i, part in enumerate(told))
    lines = (
        f"{one.label}: {one.name}" + (f" ({one.description})" if one.description else "")
        for one in options
    )
    return "\n".join((f"{title}: {told}", what, *lines, _END))


def asked(messages: Sequence[Json], question: str) -> list[Json]:
    """Returns the messages with a question behind them: in the user's last turn, if that is the
    last one."""
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": question}]
    content = last["content"]
    if isinstance(content, str):
        content = f"{content}\n\n{question}"
    else:
        content = [*content, {"type": "text", "text": question}]
    return [*before, {**last, "content": content}]


def as_texts(items: str | list[Json], place: str) -> str | list[Json]:
    """Returns the items with JSON in messages as text. Raises `BadRequest`."""
    if isinstance(items, str):
        return items
    return [
        {**item, "content": _parts_as_texts(item["content"], f"{place}.{i}.content")}
        if isinstance(item.get("content"), list)
        else item
        for i, item in enumerate(items)
    ]


def _parts_as_texts(parts: list[Any], place: str) -> list[Any]:
    return [
        {"type": "input_text", "text": _text_of(part, f"{place}.{i}")}
        if isinstance(part, dict) and part.get("type") == "input_json"
        else part
        for i, part in enumerate(parts)
    ]


def _text_of(part: Json, place: str) -> str:
    """Returns the text of a part with text or JSON. Raises `BadRequest`."""
    kind = part.get("type")
    if kind == "input_json":
        if not isinstance(part.get("data"), dict | list):
            place = f"{place}.data"
            raise BadRequest(f"{place} must be an object or a list of some", param=place)
        return json_as_text(part["data"])
    text = part.get("text")
    if kind != "input_text" or not isinstance(text, str):
        raise BadRequest(f"{place} must be a part with text or JSON", param=place)
    return text


def json_as_text(value: Any) -> str:
    """Returns a text as it is, and everything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
