"""Reads the bodies of what vLLM calls derendering: answers of /inference/v1/generate come back with
the requests that they answer, for their texts, calls and reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from decode_node.protocol.bodies.body import Ignored, Int, Name, StrictBody
from decode_node.protocol.bodies.ignored_fields import TransferFields
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from edge.http.errors import BadRequest
from engine.contracts.outputs import TokenLogprobs

_BY_ID = "token_id:"
_MAX_DIGITS = 20
PromptTokens = Annotated[Int, Field(ge=0, lt=1 << 53)]


class GivenLogprob(StrictBody):
    """The log probability of a token."""

    token_id: Int | None = None
    """The token's id."""
    token: str | None = None
    """The same as `token_id:5`, as vLLM before 0.33 has it."""
    logprob: float
    """The log probability."""
    rank: Int | None = None
    """Its place among all tokens; 1 for the most likely one."""
    bytes: Ignored = None
    """The tokenizer tells them."""

    def known_id(self) -> int:
        """Returns the token's id. Raises `BadRequest` where nothing tells it."""
        if self.token_id is not None:
            return self.token_id
        told = (self.token or "").removeprefix(_BY_ID)
        if told != self.token and told.isdecimal() and len(told) <= _MAX_DIGITS:
            return int(told)
        raise BadRequest("log probabilities must name their tokens by token_id", param="logprobs")


class GivenTokenLogprob(GivenLogprob):
    """The same of a token of the answer."""

    top_logprobs: list[GivenLogprob] | None = None
    """Those of the most likely tokens."""

    def at_its_place(self, most: int | None) -> TokenLogprobs:
        """Returns what the engine tells of a place: the token first, then the `most` likely ones,
        of which it may be one. Raises `BadRequest`."""
        chosen = self.known_id()
        others = [(one.known_id(), one.logprob) for one in self.top_logprobs or ()]
        others = sorted(others, key=lambda one: -one[1])[:most]
        ids, values = [one[0] for one in others], [one[1] for one in others]
        return TokenLogprobs([chosen, *ids], [self.logprob, *values], self.rank or 1)


class GivenLogprobs(StrictBody):
    """Log probabilities of an answer."""

    content: list[GivenTokenLogprob] | None = None
    """Those of each token."""


class GivenChoice(StrictBody):
    """An answer in tokens."""

    token_ids: Annotated[list[int], Field(fail_fast=True)]
    """All of them, with the one that ended it."""
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """The reason of its end; `stop` where it is not given."""
    stop_reason: Int | str | None = None
    """The stop token or text that ended it."""
    logprobs: GivenLogprobs | None = None
    """Their log probabilities: with all other numbers that have a fraction at most 65,536."""

    index: Ignored = None
    """Answers come in their order."""
    text: Ignored = None
    """The tokens tell it."""


class GivenAnswer(TransferFields):
    """An answer of /inference/v1/generate."""

    request_id: Name | None = None
    """The id of the answer."""
    choices: list[GivenChoice] = Field(min_length=1, fail_fast=True)
    """The answers to the prompt."""

    model: Ignored = None
    """The request names it."""
    created: Ignored = None
    """The answer was created now."""
    output_mode: Ignored = None
    """The tokens tell the text."""
    usage: Ignored = None
    """`prompt_tokens` and the tokens tell it."""
    prompt_token_ids: Ignored = None
    """`prompt_tokens` tells how many they are."""
    mm_placeholders: Ignored = None
    """They tell of the prompt."""
    prompt_logprobs: Ignored = None
    """They stay in the answer that has them."""
    timeline: Ignored = None
    """It stays there, too."""


class DerenderBody(StrictBody):
    """The fields that both kinds share."""

    model: Name | None = None
    """A name that this server gives its model; any of them, or none."""
    stream: Any = None
    """Only false: the answer is whole."""
    prompt_token_ids: Ignored = None
    """The request is rendered again."""

    def check_supported(self) -> None:
        """Raises `BadRequest` where a stream is asked for."""
        if self.stream:
            message = "what is derendered is whole; leave stream out"
            raise BadRequest(message, param="stream", code="unsupported_parameter")


class DerenderChatRequest(DerenderBody):
    """The body of POST /v1/chat/completions/derender: a chat and its answer in tokens."""

    generate_response: GivenAnswer
    """The answer."""
    chat_request: ChatCompletionRequest
    """The chat, as it was rendered."""
    prompt_tokens: PromptTokens | None = None
    """The number of tokens of the prompt, for the usage; those of the chat where it is not
    given."""

    @property
    def counts(self) -> list[int]:
        return [] if self.prompt_tokens is None else [self.prompt_tokens]


class DerenderCompletionRequest(DerenderBody):
    """The body of POST /v1/completions/derender: prompts and their answers in tokens."""

    generate_responses: list[GivenAnswer] = Field(min_length=1, fail_fast=True)
    """The answer to each prompt, in turn."""
    completion_request: CompletionRequest
    """The request, as it was rendered."""
    prompt_tokens: list[PromptTokens] | PromptTokens | None = None
    """The number of tokens of each prompt, or of all of them together."""

    @property
    def counts(self) -> list[int]:
        told = self.prompt_tokens
        return told if isinstance(told, list) else [] if told is None else [told]
