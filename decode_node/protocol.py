"""Request bodies of the OpenAI API.

Types are strict: "5" is no number. A field that is not listed is refused by name, so that a typing
error is no silent default. Fields of the API that change nothing here are accepted and ignored;
fields that would change the answer, but are not built, are refused.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decode_node.bad_words import EncodeAll, spell_bad_words
from edge.http.errors import BadRequest, HttpError
from engine.sampling_params import SamplingParams

MAX_MESSAGES = 4096
_MAX_PARTS = 4096
"""Limit of text parts of all messages together."""
_MAX_KEYS = 2048
"""Limit of keys of any object in a body."""
_MAX_ITEMS = 4096
"""Limit of items of any list in a body but messages and prompts."""
_MAX_STRING = 512
"""Limit of characters of fields that are names."""

Name = Annotated[str, Field(max_length=_MAX_STRING)]
Int = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
"""Integers that messages between processes can carry; tighter limits follow where a field is
used."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """`include_obfuscation` is accepted and ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _GenerationBody(_Body):
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


class CompletionRequest(_GenerationBody):
    """The body of POST /v1/completions. `prompt` is a text, token ids, or a list of either."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    suffix: str | None = None

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
    def is_prompt_only(self) -> bool:
        """Says whether `max_tokens` is 0, which asks about the prompt alone."""
        return self.max_tokens == 0 and bool(self.echo or self.prompt_logprobs is not None)

    @property
    def wanted_max_tokens(self) -> int | None:
        """Returns `max_tokens`, but at least the one token that engines always give."""
        return 1 if self.is_prompt_only else self.max_tokens

    def check_supported(self) -> None:
        super().check_supported()
        if self.best_of not in (None, 1):
            raise BadRequest("best_of is not supported; use n", param="best_of")
        if self.suffix:
            raise BadRequest("suffix is not supported", param="suffix")

    @property
    def num_prompts(self) -> int:
        """Returns the number of prompts, counted by the list alone, before anybody looks at its
        items.
        """
        return len(self.prompt) if self._has_several else 1

    @property
    def _has_several(self) -> bool:
        prompt = self.prompt
        return isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is not int

    def prompts(self, max_tokens: int) -> list[str | list[int]]:
        """Returns the texts, or the ids of `max_tokens` tokens at most. Raises `BadRequest` for
        everything but the four allowed shapes."""
        prompt = self.prompt
        parts = prompt if self._has_several else [prompt]
        for part in parts:
            if isinstance(part, list) and len(part) > max_tokens:
                raise too_long(max_tokens, len(part))
        if all(part and isinstance(part, str) for part in parts):
            return list(parts)
        if all(_is_token_ids(part) for part in parts):
            return list(parts)
        if prompt in (None, "", []) or "" in parts:
            raise BadRequest("prompt is missing or empty", param="prompt")
        raise BadRequest(
            "prompt must be a string, a list of token ids, or a list of either", param="prompt"
        )


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Clients send answers back as they got them, so more fields may come along;
    the template sees those that are set."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message as templates take it: text parts become one text, a line each."""
        message = {k: v for k, v in self.model_dump(exclude_none=True).items() if v != []}
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text for part in self.content)
        return message


class ChatCompletionRequest(_GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    response_format: Any = None
    modalities: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None

    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_supported(self) -> None:
        super().check_supported()
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise BadRequest(f"{name} are not supported", param=name)
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                raise BadRequest(f"{name} is not supported", param=name)
        if self.response_format not in (None, {"type": "text"}):
            raise BadRequest(
                "response_format is not supported, except for text", param="response_format"
            )
        if self.modalities not in (None, ["text"]):
            raise BadRequest("only text is supported", param="modalities")


BodyT = TypeVar("BodyT", bound=_GenerationBody)


def parse_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """Parses a body. Raises `BadRequest` for what is no JSON, NaN, half characters, what is nested
    too deeply, wrong types and unknown names."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        message = f"the body is not valid JSON: {_one_line(error)}"
        raise BadRequest(message, code="invalid_json") from None
    if not isinstance(content, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    _check_sizes(content)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _describe(error) from None


def too_long(context: int, num_tokens: int) -> BadRequest:
    return BadRequest(
        f"this model's context is {context} tokens and the prompt has {num_tokens}; shorten it",
        param="prompt",
        code="context_length_exceeded",
    )


def _check_sizes(content: dict[str, Any]) -> None:
    """Refuses what would keep the validator busy for seconds, in a look at the lengths alone."""
    objects = [content, *(value for value in content.values() if isinstance(value, dict))]
    for name, value in content.items():
        is_list = isinstance(value, list) and name not in ("messages", "prompt")
        if is_list and len(value) > _MAX_ITEMS:
            raise BadRequest(f"more than {_MAX_ITEMS} items", param=name[:_MAX_STRING])
    messages = content.get("messages")
    if isinstance(messages, list):
        if len(messages) > MAX_MESSAGES:
            raise BadRequest(f"more than {MAX_MESSAGES} messages", param="messages")
        contents = [m.get("content") for m in messages if isinstance(m, dict)]
        parts = [part for parts in contents if isinstance(parts, list) for part in parts]
        if len(parts) > _MAX_PARTS:
            raise BadRequest(f"more than {_MAX_PARTS} text parts", param="messages")
        objects += [item for item in (*messages, *parts) if isinstance(item, dict)]
    if any(len(item) > _MAX_KEYS for item in objects):
        raise BadRequest(f"an object has more than {_MAX_KEYS} keys")


def _describe(error: ValidationError) -> HttpError:
    """Returns the most exact fault, in the API's own words; values of the client are not
    repeated."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    unknown = sorted(_param(f["loc"]) for f in faults if f["type"] == "extra_forbidden")
    if unknown:
        return BadRequest(
            f"unknown parameter: {', '.join(unknown[:10])}",
            param=unknown[0],
            code="unknown_parameter",
        )
    fault = max(faults, key=lambda fault: len(fault["loc"]))
    param = _param(fault["loc"])
    code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_type"
    return BadRequest(f"{param}: {fault['msg']}", param=param, code=code)


def _param(loc: tuple[int | str, ...]) -> str:
    """Returns a place as `messages.0.content`. Pydantic also names the members of unions that it
    tried."""
    parts = [str(part) for part in loc]
    return ".".join(part for part in parts if not _UNION_MEMBER.fullmatch(part))[:_MAX_STRING]


_UNION_MEMBER = re.compile(r"str|int|float|bool|constrained-\w+|(list|dict)\[.*\]|function-.*")


def _one_line(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    """Returns `bias` with token ids as keys: JSON has no integer keys."""
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in bias):
        raise BadRequest("logit_bias: keys must be token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
