"""Builds the output items of /v1/responses, and the events that tell of them.

    nothing ──▶ reasoning ──▶ message ──▶ call ──▶ call ...        one item is open at a time

A delta of another kind closes the open item and opens the next, so that items and events are a
function of the deltas alone: a node that goes on with an answer replays its tokens, and is where
the one before it was. Calls are `decode_node.answer.responses.response_calls`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from decode_node.answer.call_ids import CallIds
from decode_node.answer.logprobs import TokenNames, chat_logprobs, without_markers
from decode_node.answer.responses.response_calls import OpenCall, open_call
from decode_node.parsers.stages.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)
from decode_node.protocol.responses.compaction import ITEM, SEAL
from decode_node.protocol.responses.responses_tools import ResponseTools
from engine.contracts.outputs import TokenLogprobs

Json = dict[str, Any]
Event = tuple[str, Json]
"""The name of an event, and its data without name and number."""

_NUM_DIGITS = 32
_PREFIXES = {"reasoning": "rs", "message": "msg", ITEM: "cmp"}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponseItems:
    """Collects the items of one answer. `name_call` gives the id of a call by index and name;
    `tools` says what a call of each function is sent as, `tokens` names tokens in log
    probabilities. `is_summary`: the text is a `compaction`."""

    def __init__(
        self,
        answer: str,
        name_call: Callable[[int, str], str],
        tools: ResponseTools,
        tokens: TokenNames,
        *,
        is_summary: bool = False,
    ) -> None:
        self._is_summary = is_summary
        self._answer = answer
        self._name_call = name_call
        self._tools = tools
        self._tokens = tokens
        self._open: Json | None = None
        self._call: OpenCall | None = None
        self._events: list[Event] = []
        self.items: list[Json] = []

    @classmethod
    def of_calls(
        cls, ids: CallIds, tools: ResponseTools, tokens: TokenNames, *, is_summary: bool = False
    ) -> ResponseItems:
        """Returns the items of the only choice, whose calls `ids` names."""

        def name_call(index: int, function: str) -> str:
            return ids.name(0, index, function)

        return cls(ids.answer, name_call, tools, tokens, is_summary=is_summary)

    def take(self, deltas: Sequence[Delta]) -> list[Event]:
        """Adds deltas and returns their events."""
        for delta in deltas:
            match delta:
                case ReasoningText(text):
                    self._add_text("reasoning", text)
                case ContentText(text) if self._is_summary:
                    self._add_summary(text)
                case ContentText(text, logprobs):
                    self._add_text("message", text, logprobs)
                case CallStart(index, name):
                    self._open_call(index, name)
                case CallArguments(_, text):
                    self._add_arguments(text)
                case CallEnd(_, is_complete):
                    self._close("completed" if is_complete else "incomplete")
        return self._taken()

    def close(self, *, is_complete: bool) -> list[Event]:
        """Ends the answer and returns the events of that. An item that is open broke off unless
        `is_complete`."""
        self._close("completed" if is_complete else "incomplete")
        return self._taken()

    def _add_text(self, kind: str, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        if self._open is None or self._open["type"] != kind:
            self._close("completed")
            self._open_text(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        fields: Json = {"content_index": 0, "delta": text}
        if kind == "message":
            own = without_markers(self._tokens, logprobs, text)
            fields["logprobs"] = chat_logprobs(self._tokens, own).content
            part["logprobs"] += fields["logprobs"]
        self._tell(f"response.{_PARTS[kind]}.delta", **fields)

    def _add_summary(self, text: str) -> None:
        """Adds to the summary, of which no event tells before its end."""
        if self._open is None or self._open["type"] != ITEM:
            self._close("completed")
            self._open_item({"type": ITEM, "encrypted_content": SEAL}, _PREFIXES[ITEM])
        assert self._open is not None
        self._open["encrypted_content"] += text

    def _open_text(self, kind: str) -> None:
        item: Json = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item["role"] = "assistant"
        else:
            item["summary"] = []
        self._open_item(item, _PREFIXES[kind])
        item["content"] = [self._part(kind)]
        self._tell("response.content_part.added", content_index=0, part=self._part(kind))

    def _open_call(self, index: int, name: str) -> None:
        self._close("completed")
        self._call = open_call(self._tools.called_tool(name), self._name_call(index, name))
        if not self._call.begins_late:
            self._open_item(self._call.item, self._call.prefix)

    def _add_arguments(self, text: str) -> None:
        assert self._call is not None
        for event, fields in self._call.add(text):
            self._tell(event, **fields)

    def _open_item(self, item: Json, prefix: str) -> None:
        place = f"{self._answer}/item/{len(self.items)}".encode()
        digest = hashlib.blake2s(place).hexdigest()[:_NUM_DIGITS]
        item["id"] = f"{prefix}_{digest}"
        self.items.append(item)
        self._open = item
        self._events.append(
            ("response.output_item.added", {"output_index": self._index, "item": dict(item)})
        )

    def _close(self, status: str) -> None:
        if (call := self._call) is not None:
            self._finish_call(call, is_complete=status == "completed")
        elif self._open is not None and self._open["type"] in _PARTS:
            self._close_text(self._open)
        if (item := self._open) is None:
            return
        if item["type"] != ITEM:
            item["status"] = status
        self._events.append(
            ("response.output_item.done", {"output_index": self._index, "item": item})
        )
        self._open = None

    def _finish_call(self, call: OpenCall, *, is_complete: bool) -> None:
        events = call.finish(is_complete=is_complete)
        if call.begins_late:
            self._open_item(call.item, call.prefix)
        for event, fields in events:
            self._tell(event, **fields)
        self._call = None

    def _close_text(self, item: Json) -> None:
        part = item["content"][0]
        fields: Json = {"content_index": 0, "text": part["text"]}
        if "logprobs" in part:
            fields["logprobs"] = part["logprobs"]
        self._tell(f"response.{part['type']}.done", **fields)
        self._tell("response.content_part.done", content_index=0, part=part)

    @staticmethod
    def _part(kind: str) -> Json:
        part: Json = {"type": _PARTS[kind], "text": ""}
        return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})

    def _tell(self, event: str, /, **fields: Any) -> None:
        """Notes an event of the open item."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": self._index}
        self._events.append((event, {**place, **fields}))

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
