"""Reads and writes the bodies of /v1/completions.

In answers, fields set to UNSET are left out; None is written as null, where the API has null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.observe.timeline import RequestMetrics, Timeline
from decode_node.protocol.bodies.body import Int
from decode_node.protocol.bodies.generation_body import GenerationBody, too_long
from decode_node.protocol.bodies.kept_part import KeptPart
from decode_node.protocol.bodies.not_built import NOT_BUILT
from decode_node.protocol.usage import PromptLogprobList, Usage
from edge.http.errors import BadRequest


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Any = None
    """A text, the ids of its tokens, or a list of up to 64 (`--max-choices`) of either, each
    computed and answered by itself."""
    echo: bool | None = None
    """Repeat the prompt before the answer; with `logprobs`, tell the prompt's as well."""
    logprobs: Int | None = None
    """Tell the log probabilities of the answer's tokens, with this many of the most likely ones."""
    suffix: str | None = None
    """Only an empty text: nothing is filled in before a suffix."""

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def may_have_no_tokens(self) -> bool:
        """Says whether `max_tokens` may be 0: the answer tells something of the prompt."""
        return bool(self.echo or self.prompt_logprobs is not None)

    @property
    def is_prompt_only(self) -> bool:
        """Says whether `max_tokens` is 0, which asks about the prompt alone."""
        return self.max_tokens == 0 and self.may_have_no_tokens

    @property
    def wanted_max_tokens(self) -> int | None:
        """Returns `max_tokens`, but at least the one token that engines always give."""
        return 1 if self.is_prompt_only else self.max_tokens

    @property
    def image_urls(self) -> Sequence[tuple[str, str]]:
        """Returns the images of the prompt, in order: the part of the body, and the URL."""
        return ()

    def check_supported(self) -> None:
        super().check_supported()
        if self.suffix:
            raise BadRequest(
                f"suffix is not supported: {NOT_BUILT['suffix'].advice}",
                param="suffix",
                code="unsupported_parameter",
            )
        if self.may_have_no_tokens and self.max_tokens is not None and self.max_tokens < 0:
            message = f"max_tokens must be at least 0, not {self.max_tokens}"
            raise BadRequest(message, param="max_tokens")

    @property
    def num_prompts(self) -> int:
        """Returns the number of prompts, counted by the list alone, before anything looks at its
        items.
        """
        return len(self.prompt) if self._has_several else 1

    @property
    def _has_several(self) -> bool:
        prompt = self.prompt
        return isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is not int

    def prompts(self, max_tokens: int, keep: KeptPart | None = None) -> list[str | list[int]]:
        """Returns the texts, or the ids of `max_tokens` tokens at most: of more the part to
        `keep` if that is given. Raises `BadRequest` for everything but the four allowed shapes."""
        prompt = self.prompt
        parts = prompt if self._has_several else [prompt]
        if keep is not None:
            parts = [keep.of(part) if isinstance(part, list) else part for part in parts]
        for part in parts:
            if isinstance(part, list) and len(part) > max_tokens:
                raise too_long(max_tokens, f"{len(part)} tokens", "prompt")
        if all(part and isinstance(part, str) for part in parts):
            return list(parts)
        if all(_is_token_ids(part) for part in parts):
            return list(parts)
        if prompt in (None, "", []) or "" in parts:
            raise BadRequest("prompt is missing or empty", param="prompt")
        if [] in parts:
            raise BadRequest(f"prompt[{parts.index([])}] has no tokens", param="prompt")
        raise BadRequest(
            "prompt must be a string, a list of token ids, or a list of either", param="prompt"
        )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


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
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    timeline: Timeline | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
