"""Reads of a body what refers to state: `store`, `previous_response_id`, `conversation` and
`background`. Nodes get the body without them; what else is wrong with it is theirs to say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from edge.http.errors import BadRequest
from router.responses.bodies.json_fields import UNREADABLE, Fields, fields_of, value_of

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Ids that can exist here."""
_STATE = ("store", "previous_response_id", "conversation", "background")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFields:
    """Holds what a body says of state. `fields` are the others; `store` is None where nothing is
    said, which means true."""

    fields: Fields
    store: bool | None = None
    previous: str = ""
    conversation: str = ""
    background: bool = False
    is_stream: bool = False

    @property
    def keeps(self) -> bool:
        return self.store is not False

    @property
    def is_stateless(self) -> bool:
        return not (self.keeps or self.previous or self.conversation or self.background)


def read_state(body: bytes) -> StateFields | None:
    """Returns what a body says; None where it is no JSON object, which others refuse. Raises
    `BadRequest`."""
    try:
        fields = fields_of(body)
        given = {name: value_of(fields, name) for name in _STATE}
        is_stream = bytes(fields.get("stream", b"")).strip() == b"true"
    except UNREADABLE:
        return None
    state = StateFields(
        fields={name: raw for name, raw in fields.items() if name not in _STATE},
        store=_flag(given, "store"),
        previous=_name(given["previous_response_id"], "previous_response_id"),
        conversation=_conversation(given["conversation"]),
        background=bool(_flag(given, "background")),
        is_stream=is_stream,
    )
    _check(state)
    return state


def _check(state: StateFields) -> None:
    if state.previous and state.conversation:
        raise BadRequest(
            "conversation and previous_response_id both say what came before; give one of them",
            param="previous_response_id",
        )
    for name in ("background", "conversation"):
        if getattr(state, name) and not state.keeps:
            raise BadRequest(
                f"{name} needs a response that is kept; leave store out, or make it true",
                param="store",
            )


def _flag(given: dict[str, Any], name: str) -> bool | None:
    value = given[name]
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", param=name, code="invalid_type")
    return value


def _name(value: Any, param: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{param} must be an id", param=param, code="invalid_type")
    return value


def _conversation(value: Any) -> str:
    return _name(value.get("id") if isinstance(value, dict) else value, "conversation")
