"""Response objects that the router forms itself, and those of nodes taken apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.responses.bodies.input_items import item_of
from router.responses.bodies.json_fields import encode, fields_of, list_of, raw_list, with_fields
from router.responses.bodies.turn import Turn
from router.store.items import Item

_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
"""Fields of a request that its response repeats, and what it says where they were not given."""
_RATE, _FIRST_CLIENT_ERROR, _FIRST_SERVER_ERROR = 429, 400, 500


def begun_body(turn: Turn, status: str) -> bytes:
    """Returns the response before anything of it was answered, without its output."""
    given = turn.state.fields
    told = {name: given.get(name, default) for name, default in _DEFAULTS.items()}
    return encode({
        "id": turn.id,
        "object": "response",
        "created_at": int(turn.created_at),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": turn.model,
        "usage": None,
        **told,
        **turn.kept_header().echoed_fields(),
    })  # fmt: skip


def split_output(data: bytes) -> tuple[str, bytes, list[Item]]:
    """Returns the status of a node's response, its body without the output, and its output."""
    fields = fields_of(data)
    output = list_of(bytes(fields.pop("output")))
    items = [item_of(item, f"output.{i}", is_output=True) for i, item in enumerate(output)]
    return json.loads(bytes(fields["status"])), encode(fields), items


def whole(body: bytes, output: Sequence[Item]) -> bytes:
    """Returns the response object with its output."""
    return with_fields(body, output=raw_list([item.data for item in output]))


def failed_body(body: bytes, code: str, message: str) -> bytes:
    """Returns the response as one that has failed."""
    return with_fields(body, status="failed", error={"code": code, "message": message})


def error_code(status: int) -> str:
    """Returns what a response says of a status with which a request was refused."""
    if status == _RATE:
        return "rate_limit_exceeded"
    is_client = _FIRST_CLIENT_ERROR <= status < _FIRST_SERVER_ERROR
    return "invalid_prompt" if is_client else "server_error"


def event_of(name: str, number: int, body: bytes) -> bytes:
    """Returns an event that tells the whole response."""
    fields = {"type": name, "sequence_number": number}
    data = encode(fields)[:-1] + b',"response":' + body + b"}"
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
