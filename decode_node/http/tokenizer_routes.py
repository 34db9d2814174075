"""The routes of the tokenizer: /tokenize, /detokenize, and /tokenizer_info where it is allowed."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decode_node.http.routes import Api
from decode_node.protocol.tokenize import DetokenizeRequest, TokenizeRequest


def tokenizer_routes(api: Api) -> list[Route]:
    serving = api.tokenizer

    async def tokenize(request: Request) -> Response:
        """Tells the tokens of a text, or of the prompt that a chat becomes."""
        body, context = await api.read(request, TokenizeRequest)
        return _json(await serving.tokenize(body, is_long=context.is_long, model=context.model))

    async def detokenize(request: Request) -> Response:
        """Tells the text of tokens."""
        body, context = await api.read(request, DetokenizeRequest)
        return _json(await serving.detokenize(body, is_long=context.is_long, model=context.model))

    async def tokenizer_info(_: Request) -> Response:
        """Tells the tokenizer's configuration; only with --enable-tokenizer-info-endpoint."""
        return _json(serving.info())

    routes = [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
    if api.settings.enable_tokenizer_info_endpoint:
        routes.append(Route("/tokenizer_info", tokenizer_info))
    return routes


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
