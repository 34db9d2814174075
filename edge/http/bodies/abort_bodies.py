"""Bodies of the calls that end answers early, as SGLang and vLLM have them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request

from edge.http.bodies.small_body import read_small_body
from edge.http.errors import BadRequest

_MAX_BYTES = 1 << 20
"""Trainers name thousands at once."""


class AbortBody(msgspec.Struct):
    """Asks for the end of the answer `rid`, or of all: POST /abort_request, as SGLang has it."""

    rid: str | None = None
    abort_all: bool = False


class AbortsBody(msgspec.Struct, forbid_unknown_fields=True):
    """Asks for the end of several answers: POST /abort_requests, as vLLM has it. Without any name
    of all, but not where the names are in a field that is not known."""

    request_ids: list[str] | None = None


async def read_abort(request: Request) -> list[str] | None:
    """Returns the names of the answers to end; None: all. Raises `BadRequest`,
    `RequestTooLarge`."""
    body = await read_small_body(request, AbortBody, _MAX_BYTES)
    if body.abort_all:
        return None
    if not body.rid:
        raise BadRequest("name an answer as rid, or send abort_all: true", param="rid")
    return [body.rid]


async def read_aborts(request: Request) -> list[str] | None:
    """Returns the same of a body with several names. Raises `BadRequest`, `RequestTooLarge`."""
    return (await read_small_body(request, AbortsBody, _MAX_BYTES)).request_ids or None


ReadAbort = Callable[[Request], Awaitable[list[str] | None]]
