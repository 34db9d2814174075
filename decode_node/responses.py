"""Response bodies of the OpenAI API.

Fields set to UNSET are left out; None is written as null, where the API has null.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.timeline import Timeline


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Each list has one entry a token. `text_offset` says where its text begins in the answer. With
    `echo` the first token is the prompt's first, of which nothing is known: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def extend(self, others: CompletionLogprobs) -> None:
        self.tokens += others.tokens
        self.token_logprobs += others.token_logprobs
        self.top_logprobs += others.top_logprobs
        self.text_offset += others.text_offset


class PromptLogprob(msgspec.Struct):
    """One token's log probability; `rank` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]
"""Has one entry a token of the prompt: by token id, it and the most likely ones; null for the
first."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The body of a whole answer, or of one chunk of it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timeline: Timeline | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatMessageOut(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timeline: Timeline | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET
    timeline: Timeline | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "tandem"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]
