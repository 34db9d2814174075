"""Reads and writes the bodies of /generate, by which trainers and benchmarks ask SGLang: texts or
token ids in, texts and token ids out.

In answers, fields set to UNSET are left out; None is written as null, where the API has null.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from decode_node.observe.timeline import Timeline
from decode_node.protocol.bodies.body import Count, Ignored, Int, Int32, Name
from decode_node.protocol.bodies.ignored_fields import PacedFields, PlacementFields
from decode_node.protocol.bodies.structured_output import JsonText
from decode_node.protocol.completions import CompletionRequest
from decode_node.protocol.other_names import named_fields
from decode_node.protocol.tokens.other_completion import CompletionOfAnother
from edge.http.errors import BadRequest

_USUAL_TOKENS = 128
"""SGLang ends an answer here where a request does not say."""
_MAX_PRIORITY = 2**31 - 1


class SGLangSampling(PacedFields):
    """How the tokens are drawn, by SGLang's names. The model's own defaults do not count here."""

    max_new_tokens: Int | None = None
    """The most tokens to generate; 128 where it is not given, and where it is null the model's
    usual length, or what is left of the context. 0 computes the prompt alone."""
    min_new_tokens: Int | None = None
    """No end of sequence, stop token or stop text ends the answer before this many tokens."""
    n: Count | None = None
    """The number of answers to each prompt; choice i is drawn with `sampling_seed` + i. All prompts
    together have at most 64 answers (`--max-choices`)."""
    temperature: float | None = None
    """How freely tokens are drawn: 0 always takes the most likely one; up to 100."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probability reaches this; 0 to 1."""
    top_k: Int | None = None
    """Sample from the k most likely tokens; 0 or -1 takes all."""
    min_p: float | None = None
    """Leave out tokens less likely than this share of the most likely one; 0 to 1."""
    frequency_penalty: float | None = None
    """Lowers tokens by how often the answer has them; -2 to 2."""
    presence_penalty: float | None = None
    """Lowers tokens that the answer has already; -2 to 2."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens that prompt or answer have; above 1 they become rarer."""
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    """Up to 64 texts that end the answer; it ends before them."""
    stop_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    """Up to 256 token ids that end the answer, besides the model's own."""
    no_stop_trim: bool | None = None
    """The answer ends with the stop text or stop token that ended it."""
    ignore_eos: bool | None = None
    """The model's own end of sequence does not end the answer."""
    skip_special_tokens: bool | None = None
    """Special tokens have no text; on unless it is false."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens where the tokenizer does; on unless it is false."""
    logit_bias: dict[str, float] | None = None
    """Adds an amount from -100 to 100 to the logits of token ids."""
    sampling_seed: Int | None = None
    """The same seed gives the same answer; one is drawn where none is given."""
    json_schema: JsonText | None = None
    """A JSON schema that the answer follows."""
    regex: str | None = None
    """A regular expression that the answer matches."""
    ebnf: str | None = None
    """A grammar of the answer."""
    structural_tag: str | dict[str, Any] | None = None
    """Text with parts that follow schemas."""

    @property
    def longest(self) -> int | None:
        """Returns the most tokens to generate; None: what is left of the context."""
        has_said = "max_new_tokens" in self.model_fields_set
        return self.max_new_tokens if has_said else _USUAL_TOKENS


class SGLangRequest(PlacementFields):
    """The body of POST /generate."""

    form_advice = "here it is sampling_params.json_schema, regex, ebnf or structural_tag"

    text: Any = None
    """A text, or a list of up to 64 (`--max-choices`), each computed and answered by itself."""
    input_ids: Any = None
    """The ids of its tokens, or a list of such lists, in its place."""
    sampling_params: SGLangSampling | None = None
    """How the tokens of all answers are drawn."""
    model: Name | None = None
    """A name that this server gives its model; an extension."""
    lora_path: Name | None = None
    """The name of a loaded adapter, in place of `model`."""
    return_logprob: bool | None = None
    """Tell the log probabilities of the answer's tokens; not in a stream."""
    logprob_start_len: Int | None = None
    """Tell those of the prompt's tokens, too, from this one on; -1: none."""
    top_logprobs_num: Int | None = None
    """Tell this many of the most likely tokens in each place."""
    token_ids_logprob: Annotated[list[Int], Field(fail_fast=True)] | None = None
    """Tell the log probabilities of these tokens in the answer, in place of the most likely ones;
    up to 128."""
    return_text_in_logprobs: bool | None = None
    """Tell the text of each token beside its id."""
    return_prompt_token_ids: bool | None = None
    """Tell the ids of the prompt's tokens: in a stream, with the last event of each answer."""
    stream: bool | None = None
    """Send the answer while it is generated (server-sent events). Each event has all of it so
    far. The longer it is, and the more answers there are, the more tokens come in one."""
    rid: Name | None = None
    """The name of the answer, in place of the X-Request-Id header."""
    priority: Int32 | None = None
    """Larger runs first, where nodes schedule by priority, as in SGLang: elsewhere smaller does."""
    cache_salt: Name | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    extra_key: Name | None = None
    """The same, besides `cache_salt`."""
    max_thinking_tokens: Int | None = None
    """The most tokens that the model may think before it answers."""

    image_data: Any = None
    """The images of a single prompt, one for each placeholder in it: `data:` URLs, URLs of hosts
    that the operator allows, or base64 alone; one or a list."""
    video_data: Any = None
    """Only empty: send media to /v1/chat/completions."""
    audio_data: Any = None
    """Only empty: send media to /v1/chat/completions."""
    session_params: Any = None
    """Only empty: send the whole prompt; what is cached of it is found."""
    return_routed_experts: Any = None
    """Only false: log probabilities are all that is given out."""
    return_hidden_states: Any = None
    """Only false: log probabilities are all that is given out."""
    return_sampling_mask: Any = None
    """Only false: log probabilities are all that is given out."""
    return_indexer_topk: Any = None
    """Only false: log probabilities are all that is given out."""

    routing_key: Ignored = None
    """The header X-Session-ID names a session."""
    log_metrics: Ignored = None
    """All requests count."""
    no_logs: Ignored = None
    """Prompts are in no log."""
    require_reasoning: Ignored = None
    """The end of the prompt tells it."""

    @property
    def is_list(self) -> bool:
        """Returns whether the answer is a list: of several prompts, or of several choices."""
        return self._has_list or self.num_answers > 1

    @property
    def num_answers(self) -> int:
        return (self._sampling.n or 1) * (len(self._prompt) if self._has_list else 1)

    @property
    def _has_list(self) -> bool:
        return isinstance(self._prompt, list) and not _is_token(self._prompt)

    @property
    def first_described(self) -> int | None:
        """Returns the place of the first token of the prompt that the answer describes; None: it
        describes none."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    def named_fields(self) -> AbstractContextManager[None]:
        """Names fields of the completion in errors as this API does."""
        prompt = "text" if self.input_ids is None else "input_ids"
        model = "model" if self.lora_path is None else "lora_path"
        return named_fields(_NAMES | {"prompt": prompt, "model": model})

    def to_completion(self) -> CompletionRequest:
        """Returns the same request as a completion. Raises `BadRequest`."""
        self._check_supported()
        sampling = self._sampling
        num_top = (self.top_logprobs_num or 0) if self.return_logprob else None
        shared = {name: getattr(sampling, name) for name in _SAME}
        return CompletionOfAnother.with_images(
            tuple(self._image_urls()),
            prompt=self._prompt,
            model=self.model if self.lora_path is None else self.lora_path,
            stream=self.stream,
            request_id=self.rid,
            priority=None if self.priority is None else min(-self.priority, _MAX_PRIORITY),
            cache_salt=self.cache_salt,
            extra_key=self.extra_key,
            logprobs=num_top,
            prompt_logprobs=None if self.first_described is None else num_top,
            logprob_token_ids=self.token_ids_logprob if self.return_logprob else None,
            max_tokens=sampling.longest,
            min_tokens=sampling.min_new_tokens,
            seed=sampling.sampling_seed,
            include_stop_str_in_output=sampling.no_stop_trim,
            thinking_token_budget=self.max_thinking_tokens,
            **shared,
        )

    @property
    def _sampling(self) -> SGLangSampling:
        return self.sampling_params or SGLangSampling()

    @property
    def _prompt(self) -> Any:
        return self.text if self.input_ids is None else self.input_ids

    def _image_urls(self) -> Iterator[tuple[str, str]]:
        """Yields the images with their places in the body. Raises `BadRequest`."""
        given = self.image_data if isinstance(self.image_data, list) else [self.image_data]
        for index, one in enumerate(given if self.image_data else ()):
            param = f"image_data.{index}" if isinstance(self.image_data, list) else "image_data"
            if self._has_list:
                message = "image_data goes with one prompt; send several requests"
                raise BadRequest(message, param="image_data", code="unsupported_parameter")
            url = one.get("url") if isinstance(one, dict) else one
            if not isinstance(url, str):
                message = f"{param} must be a URL or base64"
                raise BadRequest(message, param=param, code="invalid_type")
            yield param, url if ":" in url[:8] else f"data:image/png;base64,{url}"

    def _check_supported(self) -> None:
        """Raises `BadRequest` for what types cannot tell."""
        if (self.text is None) == (self.input_ids is None):
            raise BadRequest("send text or input_ids, and not both", param="text")
        for name in _NOT_HERE:
            if getattr(self, name):
                advice = (type(self).model_fields[name].description or "").partition(": ")[2]
                message = f"{name} is not supported: {advice.rstrip('.')}"
                raise BadRequest(message, param=name, code="unsupported_parameter")
        if self.stream and self.return_logprob:
            message = "return_logprob is not part of a stream; ask for the whole answer"
            raise BadRequest(message, param="return_logprob")
        if self.token_ids_logprob and self.first_described is not None:
            message = "token_ids_logprob tells nothing of the prompt; leave out logprob_start_len"
            raise BadRequest(message, param="logprob_start_len", code="unsupported_parameter")
        if self.token_ids_logprob and self.top_logprobs_num:
            message = "token_ids_logprob stands in place of top_logprobs_num; send one of them"
            raise BadRequest(message, param="token_ids_logprob")


def _is_token(prompt: list[Any]) -> bool:
    return bool(prompt) and type(prompt[0]) is int


_NOT_HERE = (
    "video_data", "audio_data", "session_params",
    "return_routed_experts", "return_hidden_states", "return_sampling_mask", "return_indexer_topk",
)  # fmt: skip
_SAME = SGLangSampling.model_fields.keys() & CompletionRequest.model_fields.keys()
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
_NAMES = {name: f"sampling_params.{_OTHER_NAMES.get(name, name)}" for name in _SAME} | {
    **{name: f"sampling_params.{other}" for name, other in _OTHER_NAMES.items()},
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
    "thinking_token_budget": "max_thinking_tokens",
    "request_id": "rid",
    "messages": "image_data",
}

LogprobEntry = tuple[float | None, int, str | None]
"""Log probability, token id, and its text where that was asked for."""


class FinishReason(msgspec.Struct, kw_only=True):
    """Says why an answer ended: `stop`, with the text or the token id that was `matched`,
    `length`, or `abort` where it was ended by /abort_request."""

    type: str
    matched: int | str | UnsetType = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class MetaInfo(msgspec.Struct, kw_only=True):
    """Describes an answer. Log probabilities of the prompt begin with a token that has none."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobEntry]] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[LogprobEntry]] | UnsetType = UNSET
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    timeline: Timeline | UnsetType = UNSET


class SGLangAnswer(msgspec.Struct, kw_only=True):
    """One answer, or what there is of it so far. `index` is there in streams of several."""

    text: str
    output_ids: list[int]
    prompt_token_ids: list[int] | UnsetType = UNSET
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
