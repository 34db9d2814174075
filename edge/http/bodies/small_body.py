"""Reads the short JSON bodies of calls that operators make."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from edge.http.errors import BadRequest, RequestTooLarge

_MAX_BYTES = 8192

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


async def read_small_body(
    request: Request, kind: type[BodyT], max_bytes: int = _MAX_BYTES
) -> BodyT:
    """Reads a body with the fields of `kind`. Raises `BadRequest`, `RequestTooLarge`."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise RequestTooLarge(f"the body has at most {max_bytes} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        names = ", ".join(kind.__struct_fields__)
        raise BadRequest(f"the body must be JSON with {names}: {error}") from None
