"""The routes by which an operator loads and unloads adapters of one node, as vLLM names them. A
router's routes of the same names do so on all nodes."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from decode_node.errors import PermissionDenied
from decode_node.http.callers import Caller
from decode_node.http.engine_answers import engine_answers
from edge.http.bodies.adapter_bodies import LoadBody, UnloadBody, read_adapter_body
from edge.http.errors import BadRequest, NotFound
from engine.contracts.errors import InvalidRequest
from engine.frontend.calls.adapter_calls import AdapterCalls


def adapter_routes(adapters: AdapterCalls) -> list[Route]:
    """Returns the routes. They are for routers and, where nothing has to show a key, for all."""

    async def load(request: Request) -> Response:
        """Serves the adapter in the folder `lora_path`, below `--lora-dir`, as `lora_name`; with
        `load_inplace` in place of another of that name. A router: on all nodes. For operators
        alone."""
        _check(request)
        body = await read_adapter_body(request, LoadBody)
        try:
            with engine_answers():
                ref = await adapters.load(
                    body.lora_name, body.lora_path, in_place=body.load_inplace
                )
        except InvalidRequest as error:
            raise BadRequest(error.message, param=error.param) from None
        return Response(msgspec.json.encode(ref.to_dict()), media_type="application/json")

    async def unload(request: Request) -> Response:
        """Takes the adapter `lora_name` out of use, and answers once its last request has ended. A
        router: on all nodes. For operators alone."""
        _check(request)
        body = await read_adapter_body(request, UnloadBody)
        try:
            with engine_answers():
                await adapters.unload(body.lora_name)
        except KeyError:
            raise NotFound(
                f"there is no adapter {body.lora_name!r}", param="lora_name", code="model_not_found"
            ) from None
        return PlainTextResponse(f"adapter {body.lora_name} is unloaded")

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def _check(request: Request) -> None:
    if request.state.caller is not Caller.TRUSTED:
        raise PermissionDenied("only operators may change adapters; ask the router's admin port")
