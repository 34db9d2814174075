"""Holds what the request bodies of all generating endpoints have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, TypeVar

from decode_node.protocol.bodies.bad_words import EncodeAll, spell_bad_words
from decode_node.protocol.bodies.body import Count, Ignored, Int, Int32, Name, StrictBody
from decode_node.protocol.bodies.ignored_fields import (
    AccountFields,
    PacedFields,
    PlacementFields,
    TransferFields,
)
from decode_node.protocol.bodies.kept_part import KeptPart
from decode_node.protocol.bodies.sampling_fields import SamplingFields
from decode_node.protocol.bodies.structured_output import StructuredFields
from edge.http.errors import BadRequest
from engine.contracts.errors import CONTEXT_EXCEEDED, prompt_too_long
from engine.contracts.sampling_params import BeamParams, SamplingParams
from engine.frontend.text.text_options import TextOptions
from engine.models.config.sampling_defaults import NO_DEFAULTS, SamplingDefaults

N = TypeVar("N", int, float)


class StreamOptions(StrictBody):
    """Says what a stream tells besides the answer."""

    include_usage: bool | None = None
    """Send one more chunk at the end, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Give each chunk the usage of its choice so far, with `include_usage`."""
    include_obfuscation: Ignored = None
    """Chunks are never padded."""


class GenerationBody(
    SamplingFields, StructuredFields, AccountFields, PlacementFields, PacedFields, TransferFields
):
    """The fields that both APIs share. Those that OpenAI's API has not are vLLM's."""

    model: Name | None = None
    """A name that this server gives its model; any of them, or none."""
    stream: bool | None = None
    """Send the answer in chunks as it is generated (server-sent events)."""
    stream_options: StreamOptions | None = None
    """Says what a stream tells besides the answer."""
    priority: Int32 | None = None
    """Smaller runs first, where nodes schedule by priority."""
    cache_salt: Name | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    extra_key: Name | None = None
    """The same, besides `cache_salt`; SGLang's name."""
    return_token_ids: bool | None = None
    """Tell the ids of the prompt's and the answer's tokens."""

    use_beam_search: bool | None = None
    """Answer with the best that a beam search finds, `n` of them, in place of drawing tokens."""
    best_of: Count | None = None
    """The width of the beam search; `n` where it is not given. Without `use_beam_search` only 1 or
    `n`, and any more at temperature 0, where all answers are alike."""
    length_penalty: float | None = None
    """Beam search compares sums of log probabilities, divided by the length to this power; 1."""
    early_stopping: bool | Literal["never"] | None = None
    """When beam search stops: with `true` as soon as it has `best_of` answers; with `false`, as
    where it is not given, when those that grow could not become better at their present length;
    with `never`, nor at any length."""

    add_special_tokens: bool | None = None
    """Let the tokenizer put its special tokens around the prompt: around texts unless it is false,
    around chats, whose template writes them, only if it is true."""
    truncate_prompt_tokens: Int | None = None
    """Keep this many tokens of the prompt; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """The side at which `truncate_prompt_tokens` cuts: `left` keeps the last tokens, as where it is
    not given; `right` the first."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens of log probabilities as `token_id:5`."""
    include_metrics: bool | None = None
    """Tell the request's times with the last chunk, in vLLM's form: for a single answer."""
    request_id: Name | None = None
    """The name of the answer, in place of the X-Request-Id header, which is echoed."""
    rid: Name | None = None
    """Another name for `request_id`; SGLang's."""

    metadata: Ignored = None
    """Nothing is stored that it could describe."""
    store: Ignored = None
    """Nothing is stored."""
    return_token_offsets: Ignored = None
    """Prompts are rendered without them."""
    mm_payload: Ignored = None
    """Nothing is rendered that has images."""
    return_mm_kwargs: Ignored = None
    """Nothing is rendered that has images."""

    @property
    def salt(self) -> str | None:
        """Returns what requests have in common that share cached prefixes."""
        return "/".join(part for part in (self.cache_salt, self.extra_key) if part) or None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def force_usage(self) -> None:
        """Makes a stream end with its usage, as if the request asked for it."""
        if self.stream and not self.include_usage:
            options = self.stream_options or StreamOptions()
            self.stream_options = options.model_copy(update={"include_usage": True})

    @property
    def continuous_usage(self) -> bool:
        """Says whether each chunk of a stream tells the usage so far."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens

    def param_name(self, name: str) -> str:
        """Returns the field of this API that an engine's parameter came from, for errors."""
        return self.form_field or name if name == "grammar" else name

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Returns the number of most likely tokens that are asked for; None when no log
        probabilities are.
        """

    @property
    def given_name(self) -> str | None:
        """Returns the client's own name for the answer."""
        return self.request_id or self.rid

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

    @property
    def num_beams(self) -> int:
        """Returns the number of answers that grow for each prompt."""
        if self.use_beam_search and self.best_of is not None:
            return self.best_of
        return self.num_choices

    def check_supported(self) -> None:
        """Raises `BadRequest` for what types cannot tell."""
        check_beams(self)
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "prompt_logprobs are not part of a stream; ask for the whole answer, or for echo "
                "with logprobs",
                param="prompt_logprobs",
            )
        if self.logprob_token_ids and self.wanted_logprobs is None:
            raise BadRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")

    @property
    def text_options(self) -> TextOptions:
        """Returns how the answer's tokens become text."""
        return TextOptions(
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens is not False,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            continues_prompt=self.continues_prompt,
        )

    @property
    def continues_prompt(self) -> bool:
        """Says whether the answer goes on with the text of the prompt."""
        return True

    def kept_part(self, context: int, room: int) -> KeptPart | None:
        """Returns what is kept of a longer prompt in a model with so large a context, of which the
        answer gets `room`; None to refuse what does not fit. Raises `BadRequest`."""
        asked = self.truncate_prompt_tokens
        if asked is None:
            return None
        if asked == -1:
            asked = max(1, context - room)
        if not 1 <= asked <= context:
            raise BadRequest(
                f"truncate_prompt_tokens must be -1 or 1 to {context}, this model's context, "
                f"not {asked}",
                param="truncate_prompt_tokens",
            )
        return KeptPart(asked, is_front=self.truncation_side == "right")

    def sampling(
        self, encode: EncodeAll, defaults: SamplingDefaults = NO_DEFAULTS
    ) -> SamplingParams:
        """Returns unchecked parameters; `max_tokens` and `seed` are set later. `encode` spells the
        bad words. Raises `InvalidRequest`."""
        allowed = self.allowed_token_ids
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        top_k = first_given(self.top_k, defaults.top_k, 0)
        top_p = first_given(self.top_p, defaults.top_p, 1.0)
        if top_p == 0 and not self.use_beam_search:
            top_k, top_p = 1, 1.0  # Of no share at all, the smallest set is the first token.
        named = tuple(dict.fromkeys(self.logprob_token_ids or ()))
        if self.use_beam_search:
            defaults = NO_DEFAULTS
        return SamplingParams(
            min_tokens=self.min_tokens or 0,
            temperature=first_given(self.temperature, defaults.temperature, 1.0),
            beam=beams_of(self),
            top_k=0 if top_k == -1 else top_k,
            top_p=top_p,
            min_p=first_given(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=first_given(
                self.repetition_penalty, defaults.repetition_penalty, 1.0
            ),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_token_keys(self.logit_bias or {}),
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=len(named) if named else self.wanted_logprobs,
            logprob_token_ids=named,
            prompt_logprobs=self.wanted_prompt_logprobs,
            allowed_token_ids=None if allowed is None else tuple(allowed),
            bad_words=spell_bad_words(self.bad_words or (), encode),
            no_repeat_ngram_size=self.ngram_size,
        )


def check_beams(body: GenerationBody) -> None:
    """Raises `BadRequest` for what does not go with beam search, or means nothing without it.
    Fields of sampling are compared by the engine (`check_sampling`)."""
    if not body.use_beam_search:
        are_alike = body.temperature == 0 and (body.best_of or 0) > body.num_choices
        if body.best_of not in (None, 1, body.num_choices) and not are_alike:
            message = "best_of needs use_beam_search or temperature 0; use n for several answers"
            raise BadRequest(message, param="best_of")
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, name) not in (None, neutral):
                raise BadRequest(f"{name} needs use_beam_search", param=name)
        return
    if body.stream:
        message = "beam search knows its answer at the end alone; leave stream out"
        raise BadRequest(message, param="stream")
    if body.temperature not in (None, 0.0, 1.0):
        message = f"beam search draws nothing: temperature must be 0 or 1, not {body.temperature}"
        raise BadRequest(message, param="temperature")
    if body.num_beams < 1:
        param = "n" if body.best_of is None else "best_of"
        raise BadRequest(f"{param} must be at least 1, not {body.num_beams}", param=param)
    if body.num_choices > body.num_beams:
        message = f"n must be at most best_of with use_beam_search, and {body.num_choices} is more"
        raise BadRequest(message, param="n")


def beams_of(body: GenerationBody) -> BeamParams | None:
    """Returns the beam search that is asked for, unchecked."""
    if not body.use_beam_search:
        return None
    return BeamParams(
        body.num_beams,
        1.0 if body.length_penalty is None else body.length_penalty,
        body.early_stopping or False,
    )


def too_long(context: int, size: str, param: str) -> BadRequest:
    """Returns the refusal of a prompt of this `size`, such as "9 tokens"."""
    return BadRequest(prompt_too_long(context, size), param=param, code=CONTEXT_EXCEEDED)


def first_given(own: N | None, default: N | None, otherwise: N) -> N:
    """Returns a parameter of a request, which may leave it to the model or to the API."""
    return own if own is not None else default if default is not None else otherwise


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    """Returns `bias` with token ids as keys: JSON has no integer keys."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            message = f"logit_bias: keys must be token ids, and {key[:20]!a} is none"
            raise BadRequest(message, param="logit_bias")
    return {int(key): value for key, value in bias.items()}
