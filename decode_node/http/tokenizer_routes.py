"""The routes of the tokenizer: /tokenize, /detokenize, and /tokenizer_info where it is allowed."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from decode_node.http.routes import Api
from decode_node.protocol.tokenize import DetokenizeRequest, TokenizeRequest


def create_tokenizer_router(api: Api) -> APIRouter:
    router = APIRouter()
    serving = api.tokenizer

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Tells the tokens of a text, or of the prompt that a chat becomes."""
        body, context = await api.read(request, TokenizeRequest)
        return _json(await serving.tokenize(body, is_long=context.is_long, model=context.model))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Tells the text of tokens."""
        body, context = await api.read(request, DetokenizeRequest)
        return _json(await serving.detokenize(body, is_long=context.is_long, model=context.model))

    if api.settings.enable_tokenizer_info_endpoint:

        @router.get("/tokenizer_info")
        async def tokenizer_info() -> Response:
            """Tells the tokenizer's configuration; only with --enable-tokenizer-info-endpoint."""
            return _json(serving.info())

    return router


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
