"""The HTTP API as an OpenAPI document, from the types that read and write it.

What a router answers by itself is included: clients talk to routers.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import BaseModel

from decode_node.protocol.chat import ChatCompletionRequest
from decode_node.protocol.chat_answer import ChatChunk, ChatCompletion
from decode_node.protocol.completions import Completion, CompletionRequest
from decode_node.protocol.models import Model, ModelList
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


@cache
def openapi_document() -> Json:
    structs = (ErrorBody, Completion, ChatCompletion, ChatChunk, Model, ModelList)
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF + "{name}")
    for body in (CompletionRequest, ChatCompletionRequest):
        schemas |= _body_schemas(body)
    completion = _operation("createCompletion", CompletionRequest, Completion, Completion)
    chat = _operation("createChatCompletion", ChatCompletionRequest, ChatCompletion, ChatChunk)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tandem",
            "version": "1",
            "description": "The OpenAI API; fields from `top_k` on are extensions.",
        },
        "paths": {
            "/v1/completions": {"post": completion},
            "/v1/chat/completions": {"post": chat},
            "/v1/models": {"get": _listing("listModels", ModelList)},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _body_schemas(body: type[BaseModel]) -> Json:
    schema = body.model_json_schema(ref_template=_REF + "{model}")
    parts: Json = schema.pop("$defs", {})
    return {**parts, body.__name__: schema}


def _operation(
    name: str, body: type[BaseModel], whole: type[msgspec.Struct], chunk: type[msgspec.Struct]
) -> Json:
    return {
        "operationId": name,
        "summary": (body.__doc__ or "").strip(),
        "requestBody": {"required": True, "content": _content(body.__name__)},
        "responses": {
            "200": {
                "description": f"The answer. With `stream`, events: each `data:` is a "
                f"{chunk.__name__}, the last one `[DONE]`, or an ErrorBody if it breaks off.",
                "content": {
                    **_content(whole.__name__),
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **_error_responses(),
        },
    }


def _listing(name: str, content: type[msgspec.Struct]) -> Json:
    answer = {"description": "Those that are served.", "content": _content(content.__name__)}
    return {"operationId": name, "responses": {"200": answer, **_error_responses()}}


def _error_responses() -> Json:
    content = _content(ErrorBody.__name__)
    return {
        str(status): {"description": f"{HTTPStatus(status).phrase}. {text}", "content": content}
        for status, text in _ERRORS.items()
    }


def _content(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REF + schema}}}
