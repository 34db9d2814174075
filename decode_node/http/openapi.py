"""The HTTP API as an OpenAPI document, from the types that read and write it.

What a router answers by itself is included: clients talk to routers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from inspect import cleandoc
from typing import Any

import msgspec
from pydantic import BaseModel

from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.chat_answer import ChatChunk, ChatCompletion
from decode_node.protocol.completions import Completion, CompletionRequest
from decode_node.protocol.decisions.decisions import Decision, DecisionRequest
from decode_node.protocol.messages.messages import CountTokensRequest, MessagesRequest
from decode_node.protocol.models import Model, ModelList
from decode_node.protocol.responses.responses import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from decode_node.protocol.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from decode_node.protocol.tokens.derender import DerenderChatRequest, DerenderCompletionRequest
from decode_node.protocol.tokens.generate import GenerateRequest, Generation
from decode_node.protocol.tokens.rendered import Rendered
from decode_node.protocol.tokens.sglang import SGLangAnswer, SGLangRequest
from edge.http.error_forms import AnthropicErrorBody
from edge.http.errors import ErrorBody

Json = dict[str, Any]

_REF = "#/components/schemas/"
_ERRORS = {
    400: "The request is wrong; `param` says where.",
    401: "No API key, or an unknown one.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not said to be JSON, or is compressed.",
    429: "Too much for this tenant, or the queue is full; see Retry-After.",
    431: "Request line and headers are too large.",
    503: "Nobody can serve it now; see Retry-After.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Post:
    """Describes one POST path. `answer` is the type of a whole answer, or what it is called where
    others have defined it; `stream` says what events it has otherwise, if it can be streamed."""

    path: str
    name: str
    body: type[BaseModel]
    answer: type[msgspec.Struct] | str
    stream: str = ""
    error: type[msgspec.Struct] = ErrorBody


_POSTS = (
    _Post(
        path="/v1/completions",
        name="createCompletion",
        body=CompletionRequest,
        answer=Completion,
        stream="each `data:` is a Completion, the last one `[DONE]`",
    ),
    _Post(
        path="/v1/chat/completions",
        name="createChatCompletion",
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        stream="each `data:` is a ChatChunk, the last one `[DONE]`",
    ),
    _Post(
        path="/inference/v1/generate",
        name="generate",
        body=GenerateRequest,
        answer=Generation,
        stream="each `data:` is a Generation, the last one `[DONE]`",
    ),
    _Post(
        path="/generate",
        name="generateNatively",
        body=SGLangRequest,
        answer=SGLangAnswer,
        stream="each `data:` is an SGLangAnswer, the last one `[DONE]`",
    ),
    _Post(
        path="/v1/responses",
        name="createResponse",
        body=ResponsesRequest,
        answer="A Response of OpenAI's API.",
        stream="those of OpenAI's API, the last one `response.completed` or `response.incomplete`",
    ),
    _Post(
        path="/v1/responses/input_tokens",
        name="countInputTokens",
        body=InputTokensRequest,
        answer='{"object": "response.input_tokens", "input_tokens": 12}',
    ),
    _Post(
        path="/v1/responses/compact",
        name="compactResponse",
        body=CompactRequest,
        answer="A CompactedResponse of OpenAI's API.",
    ),
    _Post(
        path="/v1/decisions",
        name="createDecision",
        body=DecisionRequest,
        answer=Decision,
    ),
    _Post(
        path="/v1/messages",
        name="createMessage",
        body=MessagesRequest,
        answer="A Message of Anthropic's API.",
        stream="those of Anthropic's API, the last one `message_stop`",
        error=AnthropicErrorBody,
    ),
    _Post(
        path="/v1/messages/count_tokens",
        name="countTokens",
        body=CountTokensRequest,
        answer='{"input_tokens": 12}',
        error=AnthropicErrorBody,
    ),
    _Post(
        path="/v1/chat/completions/render",
        name="renderChat",
        body=ChatCompletionRequest,
        answer=Rendered,
    ),
    _Post(
        path="/v1/completions/render",
        name="renderCompletions",
        body=CompletionRequest,
        answer="A list of bodies of /inference/v1/generate.",
    ),
    _Post(
        path="/v1/messages/render",
        name="renderMessages",
        body=MessagesRequest,
        answer=Rendered,
        error=AnthropicErrorBody,
    ),
    _Post(
        path="/v1/responses/render",
        name="renderResponse",
        body=ResponsesRequest,
        answer=Rendered,
    ),
    _Post(
        path="/v1/chat/completions/derender",
        name="derenderChat",
        body=DerenderChatRequest,
        answer=ChatCompletion,
    ),
    _Post(
        path="/v1/completions/derender",
        name="derenderCompletions",
        body=DerenderCompletionRequest,
        answer=Completion,
    ),
    _Post(path="/tokenize", name="tokenize", body=TokenizeRequest, answer=TokenizeAnswer),
    _Post(path="/detokenize", name="detokenize", body=DetokenizeRequest, answer=DetokenizeAnswer),
)


@cache
def openapi_document() -> Json:
    answers = [post.answer for post in _POSTS if not isinstance(post.answer, str)]
    structs = (ErrorBody, AnthropicErrorBody, *answers, ChatChunk, Model, ModelList)
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF + "{name}")
    for schema in schemas.values():
        if "description" in schema:  # As msgspec 0.23 has it; until then docstrings are indented.
            schema["description"] = cleandoc(schema["description"])
    for post in _POSTS:
        schemas |= _body_schemas(post.body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tandem",
            "version": "1",
            "description": "The APIs of OpenAI and Anthropic; fields that they have not are "
            "vLLM's.",
        },
        "paths": {
            **{post.path: {"post": _operation(post)} for post in _POSTS},
            "/v1/models": {"get": _listing("listModels", ModelList)},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _body_schemas(body: type[BaseModel]) -> Json:
    schema = body.model_json_schema(ref_template=_REF + "{model}")
    parts: Json = schema.pop("$defs", {})
    return {**parts, body.__name__: schema}


def _operation(post: _Post) -> Json:
    about, content = "The answer.", _answer_content(post.answer)
    if post.stream:
        about += f" With `stream`, events: {post.stream}, or an error if it breaks off."
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": post.name,
        "summary": (post.body.__doc__ or "").strip(),
        "requestBody": {"required": True, "content": _content(post.body.__name__)},
        "responses": {
            "200": {"description": about, "content": content},
            **_error_responses(post.error),
        },
    }


def _answer_content(answer: type[msgspec.Struct] | str) -> Json:
    if isinstance(answer, str):
        return {"application/json": {"schema": {"type": "object", "description": answer}}}
    return _content(answer.__name__)


def _listing(name: str, content: type[msgspec.Struct]) -> Json:
    answer = {"description": "Those that are served.", "content": _content(content.__name__)}
    return {"operationId": name, "responses": {"200": answer, **_error_responses(ErrorBody)}}


def _error_responses(error: type[msgspec.Struct]) -> Json:
    content = _content(error.__name__)
    return {
        str(status): {"description": f"{HTTPStatus(status).phrase}. {text}", "content": content}
        for status, text in _ERRORS.items()
    }


def _content(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REF + schema}}}
