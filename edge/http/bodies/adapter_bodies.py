"""Bodies of the calls that load and unload adapters, with vLLM's fields."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from edge.http.bodies.small_body import read_small_body


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
    return await read_small_body(request, kind)
