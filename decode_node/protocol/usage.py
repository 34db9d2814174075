"""Holds the parts of answers that every API tells in the same shape.

Fields set to UNSET are left out; None is written as null, where the API has null.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Says what answers consist of; only where something reads their reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """One token's log probability; `rank` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]
"""Has one entry a token of the prompt: by token id, it and the most likely ones; null for the
first."""
