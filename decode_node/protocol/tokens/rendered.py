"""Writes requests for text as the bodies of /inference/v1/generate that they amount to, for routers
and trainers that want the tokens of a prompt before anything is computed of it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.protocol.bodies.generation_body import GenerationBody
from decode_node.protocol.tokens.generate import GenerateSampling
from edge.http.errors import BadRequest
from engine.models.config.sampling_defaults import SamplingDefaults

Json = dict[str, Any]


class Rendered(msgspec.Struct, kw_only=True):
    """A body of POST /inference/v1/generate, whose answer has the same tokens."""

    request_id: str
    token_ids: list[int]
    sampling_params: Json
    model: str
    stream: bool = False
    stream_options: Json | None = None
    cache_salt: str | None = None
    priority: int = 0
    content_parts: list[Json] | UnsetType = UNSET
    features: None = None


def sampling_params(
    body: GenerationBody, defaults: SamplingDefaults, structured: Json | None
) -> Json:
    """Returns how a request is sampled: with the model's `defaults`, which do not count where the
    tokens go, and the form of the answer as vLLM writes it. Raises `BadRequest` for what cannot be
    said there."""
    for name in ("use_beam_search", "echo"):
        if getattr(body, name, None):
            message = f"{name} is no part of /inference/v1/generate; leave it out"
            raise BadRequest(message, param=name, code="unsupported_parameter")
    said = {name: getattr(body, name, None) for name in GenerateSampling.model_fields}
    said |= {
        "max_tokens": body.wanted_max_tokens,
        "logprobs": body.wanted_logprobs,
        "structured_outputs": structured,
    }
    model = msgspec.to_builtins(defaults)
    return {k: v for k, v in (model | _given(said)).items() if k in said}


def _given(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
