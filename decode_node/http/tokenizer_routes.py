"""The routes of the tokenizer: /tokenize, /detokenize, what renders prompts and answers, and
/tokenizer_info where it is allowed."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decode_node.http.routes import Api
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from decode_node.protocol.messages.messages import MessagesRequest
from decode_node.protocol.responses.responses import ResponsesRequest
from decode_node.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from decode_node.protocol.tokens.derender import DerenderChatRequest, DerenderCompletionRequest


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
        *_rendering_routes(api),
    ]
    if api.settings.enable_tokenizer_info_endpoint:
        routes.append(Route("/tokenizer_info", tokenizer_info))
    return routes


def _rendering_routes(api: Api) -> list[Route]:
    async def render_chat(request: Request) -> Response:
        """Tells what a chat amounts to as a body of /inference/v1/generate: its tokens, and how the
        answer's are drawn. Nothing is computed."""
        body, context = await api.read(request, ChatCompletionRequest)
        return _json(await api.serving.rendered_chat(body, context))

    async def render_completions(request: Request) -> Response:
        """Tells the same of texts, in a list."""
        body, context = await api.read(request, CompletionRequest)
        return _json(await api.serving.rendered_completions(body, context))

    async def render_messages(request: Request) -> Response:
        """Tells what such a chat amounts to as a body of /inference/v1/generate."""
        body, context = await api.read(request, MessagesRequest)
        return _json(await api.serving.rendered_other(body, context))

    async def render_response(request: Request) -> Response:
        """Tells the same of such a request, which may refer to nothing that is kept."""
        body, context = await api.read(request, ResponsesRequest)
        return _json(await api.serving.rendered_other(body, context))

    async def derender_chat(request: Request) -> Response:
        """Answers a chat with tokens that /inference/v1/generate gave: with their text, calls and
        reasoning. Nothing is computed."""
        body, context = await api.read(request, DerenderChatRequest)
        return await api.serving.derendered_chat(body, context)

    async def derender_completions(request: Request) -> Response:
        """Answers prompts in the same way, with the tokens of each."""
        body, context = await api.read(request, DerenderCompletionRequest)
        return await api.serving.derendered_completions(body, context)

    return [
        Route("/v1/chat/completions/render", render_chat, methods=["POST"]),
        Route("/v1/completions/render", render_completions, methods=["POST"]),
        Route("/v1/messages/render", render_messages, methods=["POST"]),
        Route("/v1/responses/render", render_response, methods=["POST"]),
        Route("/v1/chat/completions/derender", derender_chat, methods=["POST"]),
        Route("/v1/completions/derender", derender_completions, methods=["POST"]),
    ]


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
