"""Builds the content blocks of /v1/messages, and the events that tell of them.

Blocks are a function of the deltas alone: one is open at a time, and a delta of another kind
closes it and opens the next. The input of a call is an object in this API. Where the model's is
none, a whole message has its text under the name that the API gives such input, and a stream tells
that text, which clients cannot read as an object: no tool runs with half of what was meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from decode_node.parsers.stages.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)

Json = dict[str, Any]
_INVALID = "INVALID_JSON"
"""Anthropic's documentation of streamed tool input has it."""


class MessageBlocks:
    """Collects the blocks of one answer. `name_call` gives the id of a call by index and name;
    `signature` stands below every block of thinking."""

    def __init__(self, name_call: Callable[[int, str], str], signature: str) -> None:
        self._name_call = name_call
        self._signature = signature
        self._open: Json | None = None
        self._arguments = ""
        self._events: list[Json] = []
        self.blocks: list[Json] = []
        self.num_calls = 0

    def take(self, deltas: Sequence[Delta]) -> list[Json]:
        """Adds deltas and returns their events."""
        for delta in deltas:
            match delta:
                case ReasoningText(text):
                    self._add_text("thinking", text)
                case ContentText(text):
                    self._add_text("text", text)
                case CallStart(index, name):
                    self.num_calls += 1
                    self._open_block(
                        {"type": "tool_use", "id": self._name_call(index, name), "name": name}
                        | {"input": {}}
                    )
                case CallArguments(_, text):
                    self._add_arguments(text)
                case CallEnd():
                    self.close()
        return self._taken()

    def finish(self) -> list[Json]:
        """Ends the answer and returns the events of that."""
        self.close()
        return self._taken()

    def close(self) -> None:
        """Ends the open block, if there is one."""
        if (block := self._open) is None:
            return
        if block["type"] == "thinking":
            block["signature"] = self._signature
            self._tell_delta("signature_delta", "signature", self._signature)
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        self._events.append({"type": "content_block_stop", "index": self._index})
        self._open = None

    def _add_text(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            self._open_block({"type": kind, kind: "", **more})
        assert self._open is not None
        self._open[kind] += text
        self._tell_delta(f"{kind}_delta", kind, text)

    def _add_arguments(self, text: str) -> None:
        self._arguments += text
        self._tell_delta("input_json_delta", "partial_json", text)

    def _open_block(self, block: Json) -> None:
        self.close()
        self._arguments = ""
        self.blocks.append(block)
        self._open = block
        event = {"type": "content_block_start", "index": self._index, "content_block": dict(block)}
        self._events.append(event)

    def _tell_delta(self, kind: str, name: str, text: str) -> None:
        delta = {"type": kind, name: text}
        self._events.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _taken(self) -> list[Json]:
        events, self._events = self._events, []
        return events


def _object(arguments: str) -> Json:
    """Returns the arguments of a call, or an object that holds their text."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {_INVALID: arguments}
