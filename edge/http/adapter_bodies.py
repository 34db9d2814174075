"""Bodies of the calls that load and unload adapters, with vLLM's fields."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from edge.http.errors import BadRequest, RequestTooLarge

_MAX_BYTES = 8192


class LoadBody(msgspec.Struct):
    """Asks for the adapter in the folder `lora_path`, by the name `lora_name`. With `load_inplace`
    the name may stand for another adapter. `base_model_name`: the adapter's model, to routers of
    several."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str = ""


class UnloadBody(msgspec.Struct):
    """Asks for the end of an adapter."""

    lora_name: str
    base_model_name: str = ""


BodyT = TypeVar("BodyT", LoadBody, UnloadBody)


async def read_adapter_body(request: Request, kind: type[BodyT]) -> BodyT:
    """Reads a body. Raises `BadRequest`, `RequestTooLarge`."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BYTES:
            raise RequestTooLarge(f"the body has at most {_MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no request for an adapter: {error}") from None
