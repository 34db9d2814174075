"""Turns the bytes of a body into a checked request, or into an error that names the place.

Sizes are looked at before types, so that no body keeps the validator busy for seconds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from decode_node.protocol.bodies.body import MAX_STRING, StrictBody
from decode_node.protocol.bodies.not_built import refuse_not_built
from decode_node.protocol.bodies.wrong_type import describe
from edge.http.bodies.json_fault import json_fault
from edge.http.errors import BadRequest
from engine.contracts.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_MESSAGES = 4096
_MAX_PARTS = 4096
"""Limit of text parts of all messages together."""
_MAX_KEYS = 2048
"""Limit of keys of any object in a body."""
_MAX_ITEMS = 4096
"""Limit of items of any list in a body but messages, prompts and tokens."""
_MOST = {
    "stop": MAX_STOP_STRINGS,
    "stop_sequences": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
    "token_ids_logprob": MAX_LOGPROB_TOKEN_IDS,
}
"""Limits of lists that are refused for fewer items than that where they are used."""
_UNLIMITED = (
    "messages",
    "prompt",
    "tokens",
    "token_ids",
    "input_ids",
    "required_prefix_token_ids",
)
_SAMPLING = "sampling_params"
BodyT = TypeVar("BodyT", bound=StrictBody)


def parse_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """Parses a body. Raises `BadRequest` for what is no JSON, NaN, half characters, what is nested
    too deeply, wrong types and what is known but not built."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        message = f"the body is not valid JSON: {json_fault(body, error)}"
        raise BadRequest(message, code="invalid_json") from None
    if not isinstance(content, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return validate(content, kind)


def validate(content: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """Checks the sizes, the types and the names of a body that was parsed. Raises `BadRequest`."""
    _check_sizes(content)
    kind.check_meant(content)
    try:
        found = kind.model_validate(content)
    except ValidationError as error:
        raise describe(error, content) from None
    refuse_not_built(found)
    if isinstance(sampling := getattr(found, _SAMPLING, None), StrictBody):
        refuse_not_built(sampling, f"{_SAMPLING}.", found.form_advice)
    return found


def _check_sizes(content: dict[str, Any]) -> None:
    """Refuses what would keep the validator busy for seconds, in a look at the lengths alone."""
    objects = [content, *(value for value in content.values() if isinstance(value, dict))]
    _check_lists(content, "", _UNLIMITED)
    if isinstance(sampling := content.get(_SAMPLING), dict):
        _check_lists(sampling, f"{_SAMPLING}.")
        objects += [value for value in sampling.values() if isinstance(value, dict)]
    messages = content.get("messages")
    if isinstance(messages, list):
        if len(messages) > MAX_MESSAGES:
            raise BadRequest(f"more than {MAX_MESSAGES} messages", param="messages")
        contents = [m.get("content") for m in messages if isinstance(m, dict)]
        parts = [part for parts in contents if isinstance(parts, list) for part in parts]
        if len(parts) > _MAX_PARTS:
            raise BadRequest(f"more than {_MAX_PARTS} text parts", param="messages")
        calls = [m.get("tool_calls") for m in messages if isinstance(m, dict)]
        if sum(len(made) for made in calls if isinstance(made, list)) > _MAX_PARTS:
            raise BadRequest(f"more than {_MAX_PARTS} tool calls", param="messages")
        objects += [item for item in (*messages, *parts) if isinstance(item, dict)]
    if any(len(item) > _MAX_KEYS for item in objects):
        raise BadRequest(f"an object has more than {_MAX_KEYS} keys")


def _check_lists(content: dict[str, Any], place: str, unlimited: tuple[str, ...] = ()) -> None:
    for name, value in content.items():
        is_list = isinstance(value, list) and name not in unlimited
        if is_list and len(value) > _MAX_ITEMS:
            param = (place + name)[:MAX_STRING]
            most = _MOST.get(name, _MAX_ITEMS)
            raise BadRequest(f"{param} has {len(value)} items, more than {most}", param=param)
