"""Holds what the request bodies of all generating endpoints have in common.

Types are strict: "5" is no number. A field that is not listed is refused by name, so that a typing
error is no silent default. Fields of the API that change nothing here are accepted and ignored;
fields that would change the answer, but are not built, are refused.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from decode_node.protocol.bad_words import EncodeAll, spell_bad_words
from edge.http.errors import BadRequest
from engine.sampling_params import SamplingParams

MAX_STRING = 512
"""Limit of characters of fields that are names."""
Name = Annotated[str, Field(max_length=MAX_STRING)]
Int = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
"""Integers that messages between processes can carry; tighter limits follow where a field is
used."""


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(StrictBody):
    """`include_obfuscation` is accepted and ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(StrictBody):
    """The fields that both APIs share; from `top_k` on, extensions with vLLM's names."""

    model: Name | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Name | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Int | None = None
    allowed_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Returns the number of most likely tokens that are asked for; None when no log
        probabilities are.
        """

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Returns the same number for the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def echoes_logprobs(self) -> bool:
        """Says whether log probabilities of the answer begin with those of the prompt."""
        return False

    @property
    def is_prompt_only(self) -> bool:
        """Says whether the answer is only about the prompt."""
        return False

    def check_supported(self) -> None:
        """Raises `BadRequest` for what types cannot tell."""
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "prompt_logprobs are not part of a stream; ask for the whole answer, or for echo "
                "with logprobs",
                param="prompt_logprobs",
            )

    def sampling(self, encode: EncodeAll) -> SamplingParams:
        """Returns unchecked parameters; `max_tokens` and `seed` are set later. `encode` spells the
        bad words. Raises `InvalidRequest`."""
        allowed = self.allowed_token_ids
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        top_k = self.top_k or 0
        return SamplingParams(
            min_tokens=self.min_tokens or 0,
            temperature=_or(self.temperature, 1.0),
            top_k=0 if top_k == -1 else top_k,
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=_token_keys(self.logit_bias or {}),
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.wanted_logprobs,
            prompt_logprobs=self.wanted_prompt_logprobs,
            allowed_token_ids=None if allowed is None else tuple(allowed),
            bad_words=spell_bad_words(self.bad_words or (), encode),
        )


def too_long(context: int, num_tokens: int) -> BadRequest:
    return BadRequest(
        f"this model's context is {context} tokens and the prompt has {num_tokens}; shorten it",
        param="prompt",
        code="context_length_exceeded",
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    """Returns `bias` with token ids as keys: JSON has no integer keys."""
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in bias):
        raise BadRequest("logit_bias: keys must be token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
