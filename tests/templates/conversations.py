"""Conversations as clients send them: what they say has words that must not be lost.

Every text has a word of its own that begins with `w` and a number, so that a prompt shows what is
in it, and in which order. `WHY` marks reasoning, which many templates leave out on purpose.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads <a> file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where it is"},
                    "lines": {"type": "integer"},
                },
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


class _Words:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, text: str = "says") -> str:
        return f"w{next(self._numbers)}w {text}"


class Talk:
    """One conversation under construction."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._word = _Words()
        self._num_calls = 0

    def say(self, role: str, *, parts: int = 0, **fields: Any) -> Talk:
        content: Any = self._word()
        if parts:
            content = [{"type": "text", "text": self._word()} for _ in range(parts)]
        self.messages.append({"role": role, "content": content, **fields})
        return self

    def call(
        self,
        *names: str,
        content: bool = False,
        style: str = "call_",
        arguments: str = "",
        **fields: Any,
    ) -> Talk:
        """Adds a turn with calls, and their results."""
        calls = []
        for name in names:
            self._num_calls += 1
            given = json.dumps({"path": self._word("/x"), "lines": 3} if name != "now" else {})
            function = {"name": name, "arguments": arguments or given}
            id_ = f"functions.{name}:{self._num_calls}" if style == "kimi" else ""
            id_ = id_ or f"{style}{self._num_calls:09d}"
            calls.append({"id": id_, "type": "function", "function": function})
        text = self._word() if content else None
        turn: Json = {"role": "assistant", "content": text, "tool_calls": calls, **fields}
        self.messages.append(turn)
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": self._word()}
            self.messages.append(result)
        return self


def conversations() -> Iterator[tuple[str, Json]]:
    """Yields (name, body of a chat)."""
    for name, messages in _plain().items():
        yield name, {"messages": messages}
    for name, messages in _with_tools().items():
        yield name, {"messages": messages, "tools": TOOLS}


def _plain() -> dict[str, Sequence[Json]]:
    return {
        "one turn": Talk().say("user").messages,
        "system": Talk().say("system").say("user").messages,
        "developer": Talk().say("developer").say("user").messages,
        "three turns": Talk().say("user").say("assistant").say("user").messages,
        "system, three turns": Talk()
        .say("system")
        .say("user")
        .say("assistant")
        .say("user")
        .messages,
        "parts": Talk().say("user", parts=2).messages,
        "parts of system": Talk().say("system", parts=2).say("user").messages,
        "parts of assistant": Talk().say("user").say("assistant", parts=3).say("user").messages,
        "two users": Talk().say("user").say("user").messages,
        "two users late": Talk().say("user").say("assistant").say("user").say("user").messages,
        "two assistants": Talk().say("user").say("assistant").say("assistant").say("user").messages,
        "system behind user": Talk().say("user").say("system").messages,
        "system amid": Talk().say("user").say("assistant").say("system").say("user").messages,
        "two systems": Talk().say("system").say("system").say("user").messages,
        "system first and amid": (
            Talk().say("system").say("user").say("assistant").say("system").say("user").messages
        ),
        "two developers, two users": (
            Talk().say("developer").say("developer").say("user").say("user").messages
        ),
        "ended by assistant": Talk().say("user").say("assistant").messages,
        "greeting": Talk().say("assistant").say("user").messages,
        "system and greeting": Talk().say("system").say("assistant").say("user").messages,
        "system alone": Talk().say("system").messages,
        "begun answer alone": Talk().say("assistant").messages,
        "empty answer": [
            *Talk().say("user").messages,
            {"role": "assistant", "content": None},
            {"role": "user", "content": "w9w go on"},
        ],
        "refusal": [
            *Talk().say("user").messages,
            {"role": "assistant", "content": None, "refusal": "w8w no"},
            {"role": "user", "content": "w9w why"},
        ],
        "null fields": Talk()
        .say("user", name=None)
        .say("assistant", tool_calls=None)
        .say("user")
        .messages,
        "empty calls": Talk().say("user").say("assistant", tool_calls=[]).say("user").messages,
        "reasoning": Talk()
        .say("user")
        .say("assistant", reasoning_content="WHY")
        .say("user")
        .messages,
        "another name of reasoning": (
            Talk().say("user").say("assistant", reasoning="WHY").say("user").messages
        ),
    }


def _with_tools() -> dict[str, Sequence[Json]]:
    def start() -> Talk:
        return Talk().say("system").say("user")

    return {
        "tools": start().messages,
        "tools without system": Talk().say("user").messages,
        "one call": start().call("read_file").messages,
        "one call without system": Talk().say("user").call("read_file").messages,
        "one call, answered": start().call("read_file").say("assistant").messages,
        "one call, going on": start().call("read_file").say("assistant").say("user").messages,
        "content and call": start().call("read_file", content=True).messages,
        "call without arguments": start().call("now").messages,
        "two calls": start().call("read_file", "now").messages,
        "two calls, content": start().call("read_file", "read_file", content=True).messages,
        "call after call": start().call("read_file").call("now").call("read_file").messages,
        "user behind a result": start().call("read_file").say("user").messages,
        "system behind a result": start().call("read_file").say("system").messages,
        "reasoning and call": start().call("read_file", reasoning_content="WHY").messages,
        "reasoning, content, call": (
            start().call("read_file", content=True, reasoning_content="WHY").messages
        ),
        "thinking and call": start().call("read_file", thinking="WHY").messages,
        "Anthropic's ids": start().call("read_file", "now", style="toolu_").messages,
        "Kimi's ids": start().call("read_file", style="kimi").messages,
        "Mistral's ids": start().call("read_file", style="").messages,
        "arguments are a list": start().call("read_file", arguments="[1]").messages,
        "arguments broken off": start().call("read_file", arguments='{"path": "/y').messages,
        "arguments empty": start().call("now", arguments=" ").messages,
        "developer, two users, call": (
            Talk().say("developer").say("user").say("user").call("read_file").messages
        ),
        "call without result": [
            *start().call("read_file").messages[:-1],
            {"role": "user", "content": "w9w go on"},
        ],
        "result behind more": _result_behind_more(start()),
        "result without call": [
            *start().messages,
            {"role": "tool", "tool_call_id": "call_000000009", "content": "w8w"},
            {"role": "user", "content": "w9w go on"},
        ],
        "results in parts": _result_in_parts(start()),
        "long": _long(start()),
    }


def _result_in_parts(talk: Talk) -> list[Json]:
    talk.call("read_file")
    parts = [{"type": "text", "text": "w101w"}, {"type": "text", "text": "w102w"}]
    return [*talk.messages[:-1], {**talk.messages[-1], "content": parts}]


def _result_behind_more(talk: Talk) -> list[Json]:
    *before, result = talk.call("read_file").messages
    between = [
        {"role": "assistant", "content": "w101w I look"},
        {"role": "user", "content": "w102w do"},
    ]
    return [*before, *between, result]


def _long(talk: Talk) -> list[Json]:
    for _ in range(8):
        talk.call("read_file", content=True).say("assistant").say("user")
    return talk.messages
