"""Reads and writes the bodies of /inference/v1/generate, by which trainers ask vLLM: token ids in,
token ids out.

In answers, fields set to UNSET are left out; None is written as null, where the API has null.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from decode_node.observe.timeline import Timeline
from decode_node.protocol.bodies.body import Ignored, Int, Int32, Name
from decode_node.protocol.bodies.generation_body import StreamOptions
from decode_node.protocol.bodies.ignored_fields import PacedFields, TransferFields
from decode_node.protocol.bodies.sampling_fields import SamplingFields
from decode_node.protocol.bodies.structured_output import StructuredOutputs
from decode_node.protocol.completions import CompletionRequest
from decode_node.protocol.other_names import named_fields
from decode_node.protocol.tokens.other_completion import CompletionOfAnother
from decode_node.protocol.usage import PromptLogprobList, Usage
from edge.http.errors import BadRequest


class GenerateSampling(SamplingFields, PacedFields):
    """How the tokens are drawn, as vLLM's `SamplingParams` has it. The model's own defaults do not
    count here, only its usual length."""

    logprobs: Int | None = None
    """Tell the log probabilities of the answer's tokens, with this many of the most likely ones."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer."""
    thinking_token_budget: Int | None = None
    """The most tokens that the model may think before it answers; -1 for any number."""

    detokenize: Ignored = None
    """The answer has text where `output_mode` asks for it."""
    output_kind: Ignored = None
    """`stream` says it."""
    flat_logprobs: Ignored = None
    """They have one form."""
    skip_reading_prefix_cache: Ignored = None
    """Cached prefixes are read."""
    routed_experts_prompt_start: Ignored = None
    """The answer does not say which experts computed a token."""


class GenerateRequest(TransferFields):
    """The body of POST /inference/v1/generate."""

    form_advice = "it is called sampling_params.structured_outputs here"

    token_ids: Annotated[list[int], Field(fail_fast=True, min_length=1)]
    """The ids of the prompt's tokens."""
    sampling_params: GenerateSampling
    """How the answer's tokens are drawn, and what the answer tells of them."""
    model: Name | None = None
    """A name that this server gives its model; any of them, or none."""
    output_mode: Literal["tokens", "text", "derender"] | None = None
    """Only `tokens`, as where it is not given, or `text`, which has the text, too. What parses the
    text is /v1/chat/completions/derender."""
    return_token_ids: bool | None = None
    """Tell the ids of the prompt's tokens, too."""
    stream: bool | None = None
    """Send the tokens as they are generated (server-sent events)."""
    stream_options: StreamOptions | None = None
    """Says what a stream tells besides the answer."""
    cache_salt: Name | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: Int32 | None = None
    """Smaller runs first, where nodes schedule by priority."""
    request_id: Name | None = None
    """The name of the answer, in place of the X-Request-Id header."""

    content_parts: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """The images of the prompt, one for each placeholder in it: `{"type": "image_url", "url": ...}`
    with a `data:` URL or one of a host that the operator allows. With `return_token_ids` the answer
    has the prompt with room for them, and `mm_placeholders`."""
    features: Any = None
    """Only empty: send images as `content_parts`; the nodes prepare them."""

    token_offsets: Ignored = None
    """Nothing is computed from text."""
    reasoning_ended: Ignored = None
    """The end of the prompt tells it."""
    reasoning_parser_kwargs: Ignored = None
    """The end of the prompt tells it."""
    parse_context: Ignored = None
    """Nothing is parsed."""

    @property
    def has_text(self) -> bool:
        return self.output_mode == "text"

    def named_fields(self) -> AbstractContextManager[None]:
        """Names fields of the completion in errors as this API does."""
        return named_fields(_NAMES)

    def to_completion(self) -> CompletionRequest:
        """Returns the same request as a completion. Raises `BadRequest`."""
        if self.output_mode == "derender":
            message = (
                "output_mode derender is not built; send tokens to /v1/chat/completions/derender"
            )
            raise BadRequest(message, param="output_mode", code="unsupported_parameter")
        if self.features:
            message = "features is not supported: send images as content_parts"
            raise BadRequest(message, param="features", code="unsupported_parameter")
        sampling = {name: getattr(self.sampling_params, name) for name in _SAMPLING}
        shared = {name: getattr(self, name) for name in _SHARED}
        images = tuple(self._image_urls())
        return CompletionOfAnother.with_images(images, prompt=self.token_ids, **shared, **sampling)

    def _image_urls(self) -> Iterator[tuple[str, str]]:
        """Yields the images with their places in the body. Raises `BadRequest`."""
        for index, part in enumerate(self.content_parts or ()):
            param = f"content_parts.{index}"
            if part.get("type") != "image_url":
                message = f"{param}.type must be image_url; send other media to chats"
                raise BadRequest(message, param=f"{param}.type", code="unsupported_parameter")
            if not isinstance(url := part.get("url"), str):
                param = f"{param}.url"
                raise BadRequest(f"{param} must be a string", param=param, code="invalid_type")
            yield param, url


_SHARED = GenerateRequest.model_fields.keys() & CompletionRequest.model_fields.keys()
_SAMPLING = GenerateSampling.model_fields.keys() & CompletionRequest.model_fields.keys()
_NAMES = {"prompt": "token_ids", "messages": "content_parts"} | {
    name: f"sampling_params.{name}" for name in _SAMPLING
}


class GenerateLogprob(msgspec.Struct, kw_only=True):
    """The log probability of a token. `token` is its text where the answer has text, and its id in
    the words of vLLM before 0.33 elsewhere. `rank` is 1 for the most likely token, and null for
    tokens that the client named."""

    token_id: int
    token: str
    logprob: float
    bytes: list[int] | UnsetType = UNSET
    rank: int | None


class GenerateTokenLogprob(GenerateLogprob, kw_only=True):
    """The same of a token of the answer; `top_logprobs` begin with it, and go on with the most
    likely ones."""

    top_logprobs: list[GenerateLogprob]

    @classmethod
    def of(cls, top: list[GenerateLogprob]) -> Self:
        return cls(**msgspec.structs.asdict(top[0]), top_logprobs=top)


class GenerateLogprobs(msgspec.Struct):
    content: list[GenerateTokenLogprob]


class GenerateChoice(msgspec.Struct, kw_only=True):
    """One answer, or what a chunk tells of it. `text` is there where `output_mode` asks for it."""

    index: int
    text: str | UnsetType = UNSET
    token_ids: list[int]
    logprobs: GenerateLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Placeholder(msgspec.Struct, kw_only=True):
    """Tells where a prompt has the tokens of an image."""

    offset: int
    length: int


class Generation(msgspec.Struct, kw_only=True):
    """The body of a whole answer, or of one chunk of it."""

    request_id: str
    created: int
    model: str
    output_mode: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    mm_placeholders: dict[str, list[Placeholder]] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET
    timeline: Timeline | UnsetType = UNSET
