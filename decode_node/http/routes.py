"""The routes of a decode node. Each takes a few lines: read, check, hand over."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decode_node.answer.journal import (
    MAX_RESUME_BYTES,
    read_resume,
)
from decode_node.answer.running.aborts import OpenAnswers
from decode_node.config import DecodeNodeSettings
from decode_node.errors import Unavailable
from decode_node.http.callers import Caller
from decode_node.http.ignored_fields import IgnoredFields
from decode_node.http.router_headers import prompt_places, resume_offset
from decode_node.metrics import DecodeMetrics
from decode_node.protocol.bodies.parse_body import BodyT, parse_body
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from decode_node.protocol.decisions.decisions import DecisionRequest
from decode_node.protocol.messages.messages import CountTokensRequest, MessagesRequest
from decode_node.protocol.models import ModelList
from decode_node.protocol.responses.responses import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from decode_node.protocol.tokens.generate import GenerateRequest
from decode_node.protocol.tokens.sglang import SGLangRequest
from decode_node.serving.model_cards import ModelCards
from decode_node.serving.openai_serving import OpenAIServing
from decode_node.serving.request_context import RequestContext, created_at
from decode_node.serving.tokenizer_serving import TokenizerServing
from edge.http import headers as names
from edge.http.answers.heartbeats import Heartbeats
from edge.http.answers.kept_response import KeptResponse
from edge.http.answers.model_info import MODEL_INFO_PATHS, model_info
from edge.http.connection.client_connection import lease_of, read_json_body, request_headers
from edge.http.event_loop import long_work
from edge.http.request_head import READY_PATHS
from edge.http.unknown_path import path_without_slash
from engine.frontend.calls.adapter_calls import AdapterCalls
from engine.node.open_requests import OpenRequests
from engine.node.services.profile_servicer import ProfiledEngine

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ApiState:
    """Says whether this node takes requests, and which it has taken. `unhealthy` holds why it
    cannot serve, and is empty when it can; `own_fault` tells why others refuse it. `open`: those
    whose answer has not ended, be their prompt known or not; `answers`: those of them whose prompt
    is."""

    draining: bool = False
    unhealthy: str = ""
    own_fault: Callable[[], str] = str
    open: OpenRequests = field(default_factory=OpenRequests)
    answers: OpenAnswers = field(default_factory=OpenAnswers)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)

    def check_alive(self) -> None:
        """Raises `Unavailable` unless the engine works."""
        if self.unhealthy:
            raise Unavailable(f"this node cannot serve: {self.unhealthy}")

    def check_accepting(self) -> None:
        """Raises `Unavailable` unless new requests are welcome."""
        self.check_alive()
        if self.draining:
            raise Unavailable("this node is stopping; send the request to another", code="draining")


@dataclass(frozen=True, slots=True)
class Api:
    """Holds what the routes work with."""

    settings: DecodeNodeSettings
    cards: ModelCards
    serving: OpenAIServing
    metrics: DecodeMetrics
    state: ApiState
    ignored: IgnoredFields
    tokenizer: TokenizerServing
    reset_prefix_cache: Callable[[float], Awaitable[bool]]
    profiles: ProfiledEngine
    adapters: AdapterCalls

    async def read(self, request: Request, kind: type[BodyT]) -> tuple[BodyT, RequestContext]:
        """Reads the body and the headers of a request. Raises `HttpError`."""
        received_at, early = time.monotonic(), self.state.answers.expect()
        await long_work.pause()
        self.state.check_accepting()
        headers = request_headers(request.scope)
        is_router = request.state.caller is Caller.TRUSTED
        if not (is_router and self.settings.trust_router_headers):
            headers = {k: v for k, v in headers.items() if k not in names.FROM_ROUTERS}
        limits = self.settings.body_limits(MAX_RESUME_BYTES if names.RESUME in headers else 0)
        offset = resume_offset(headers)
        with lease_of(request.scope, limits) as lease:
            raw = await read_json_body(headers, request.receive, limits, lease, offset)
            is_long = len(raw) > long_work.LONG_BODY
            resume = None if offset is None else read_resume(raw[offset:])
            read = partial(_parsed, raw[:offset], kind)
            body, unknown = await long_work.run(is_long, read)
        kept = KeptResponse.of_header(headers.get(names.RESPONSE, ""))
        trace = request.state.trace
        logger.debug("request %s: trace %s", request.state.request_id, trace.trace_id)
        context = RequestContext(
            request_id=request.state.request_id,
            received_at=received_at,
            created=created_at(resume, kept),
            is_long=is_long,
            places=prompt_places(headers),
            wants_timeline=headers.get(names.TIMELINE) == "1",
            wants_journal=headers.get(names.JOURNAL) == "1",
            wants_keepalives=headers.get(names.SSE_KEEPALIVE) != "0",
            resume=resume,
            model=names.decode_name(headers.get(names.MODEL, "")),
            adapter_digest=headers.get(names.ADAPTER, ""),
            cache_salt=headers.get(names.CACHE_SALT, ""),
            trace=trace,
            load_format=headers.get(names.LOAD_FORMAT, ""),
            kept=kept,
            is_aborted=headers.get(names.ABORTED) == "1",
            early=early,
        )
        self.ignored.note(unknown)
        await long_work.pause()
        return body, context


def _parsed(raw: bytes, kind: type[BodyT]) -> tuple[BodyT, list[str]]:
    """Returns a body, and the names in it that are not known. Raises `BadRequest`."""
    body = parse_body(raw, kind)
    return body, body.unknown_fields()


def client_routes(api: Api) -> list[Route]:
    """Returns the routes of all that clients ask, but for the tokenizer's."""
    return [*_answers(api), *_responses(api), *_messages(api), *_state(api)]


def _answers(api: Api) -> list[Route]:
    """Returns what computes something from a body."""

    async def chat_completions(request: Request) -> Response:
        """Answers a chat."""
        body, context = await api.read(request, ChatCompletionRequest)
        return await api.serving.chat(body, context)

    async def completions(request: Request) -> Response:
        """Continues texts."""
        body, context = await api.read(request, CompletionRequest)
        return await api.serving.completions(body, context)

    async def generate(request: Request) -> Response:
        """Continues a prompt of token ids, and answers with token ids, as vLLM does."""
        body, context = await api.read(request, GenerateRequest)
        return await api.serving.generate(body, context)

    async def native(request: Request) -> Response:
        """Continues texts or token ids, and answers with both, as SGLang does."""
        body, context = await api.read(request, SGLangRequest)
        return await api.serving.native(body, context)

    async def decisions(request: Request) -> Response:
        """Answers questions about an input by probabilities."""
        body, context = await api.read(request, DecisionRequest)
        return await api.serving.decisions(body, context)

    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/inference/v1/generate", generate, methods=["POST"]),
        Route("/generate", native, methods=["POST"]),
        Route("/v1/decisions", decisions, methods=["POST"]),
    ]


def _responses(api: Api) -> list[Route]:
    """Returns those of OpenAI's newer API of chats."""

    async def responses(request: Request) -> Response:
        """Answers a chat in the shape of OpenAI's newer API, and keeps nothing."""
        body, context = await api.read(request, ResponsesRequest)
        return await api.serving.responses(body, context)

    async def input_tokens(request: Request) -> Response:
        """Tells how many tokens the prompt of such a request has."""
        body, context = await api.read(request, InputTokensRequest)
        if context.kept is not None and context.kept.is_check:
            count = await api.serving.check_response(body, context)
        else:
            count = await api.tokenizer.count(body, is_long=context.is_long, model=context.model)
        return _json({"object": "response.input_tokens", "input_tokens": count})

    async def compact(request: Request) -> Response:
        """Sums a conversation up in one item, which stands for it in later inputs."""
        body, context = await api.read(request, CompactRequest)
        return await api.serving.compact(body, context)

    return [
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        Route("/v1/responses/compact", compact, methods=["POST"]),
    ]


def _messages(api: Api) -> list[Route]:
    """Returns those of Anthropic's API."""

    async def messages(request: Request) -> Response:
        """Answers a chat in the shape of Anthropic's API."""
        body, context = await api.read(request, MessagesRequest)
        return await api.serving.messages(body, context)

    async def count_tokens(request: Request) -> Response:
        """Tells how many tokens the prompt of such a chat has."""
        body, context = await api.read(request, CountTokensRequest)
        count = await api.tokenizer.count(body, is_long=context.is_long, model=context.model)
        return _json({"input_tokens": count})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def _state(api: Api) -> list[Route]:
    """Returns what tells something of the node."""

    async def models(_: Request) -> Response:
        """Lists the names of the model."""
        cards = api.cards.all()
        return _json(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))

    async def model(request: Request) -> Response:
        """Describes one model."""
        name: str = request.path_params["name"]
        if not name:
            raise path_without_slash(request)
        return _json(api.cards.of(name))

    async def described(_: Request) -> Response:
        """Describes the first model as SGLang does."""
        card = api.cards.all()[0]
        return _json(model_info(card.id, card.root))

    async def health(_: Request) -> Response:
        """Answers 200 while the process answers and its engine works."""
        api.state.check_alive()
        return Response(api.state.own_fault(), media_type="text/plain")

    async def ready(_: Request) -> Response:
        """Answers 200 while new requests are welcome."""
        api.state.check_accepting()
        if fault := api.state.own_fault():
            raise Unavailable(f"others refuse this node: {fault}")
        return Response(status_code=200)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        *(Route(path, described) for path in MODEL_INFO_PATHS),
        Route("/health", health),
        *(Route(path, ready) for path in READY_PATHS),
    ]


def _json(content: msgspec.Struct | dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
