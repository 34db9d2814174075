"""Reads and writes the bodies of /tokenize and /detokenize, which vLLM has."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from decode_node.protocol.bodies.body import Name, StrictBody
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.chat_messages import ChatMessage
from edge.http.errors import BadRequest


class TokenizeRequest(ChatCompletionRequest):
    """The body of POST /tokenize: a text, or a chat with what shapes its prompt. Fields that only
    sampling uses change nothing."""

    prompt: str | None = None
    """The text, if it is not a chat."""
    messages: list[ChatMessage] = Field(default=[], fail_fast=True)
    """The chat, as in /v1/chat/completions."""
    return_token_strs: bool | None = None
    """Tell each token's text in the vocabulary as well."""

    def check_supported(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise BadRequest("send a prompt or messages, and not both", param="prompt")


class DetokenizeRequest(StrictBody):
    """The body of POST /detokenize."""

    model: Name | None = None
    """A name that this server gives its model; any of them, or none."""
    tokens: Annotated[list[int], Field(fail_fast=True)]
    """The ids of the tokens."""


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    prompt: str
