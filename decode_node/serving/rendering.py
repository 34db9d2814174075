"""Renders requests for text as requests for tokens, which any node would answer in the same way,
and gives the answers to these the form that the requests for text ask for.

    rendered         a request for tokens for each prompt
    asked_as_given   the request asks for what is given, and for nothing else
    given            the tokens, as if another node had given all of them: nothing is computed
    as_ended         the choices end as it was given
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from msgspec import UNSET

from decode_node.answer.choice import Choice
from decode_node.answer.journal import End, Resume, ResumedChoice
from decode_node.grammar.structured_output import find_constraint
from decode_node.images.image_parts import image_places
from decode_node.protocol.bodies.generation_body import GenerationBody
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.tokens.derender import DerenderBody, GivenAnswer, GivenChoice
from decode_node.protocol.tokens.rendered import Rendered, sampling_params
from decode_node.serving.read_request import ReadRequest
from edge.http.errors import BadRequest
from engine.config import ModelConfig
from engine.contracts.outputs import TokenLogprobs


def rendered(read: ReadRequest) -> list[Rendered]:
    """Returns one request for tokens for each prompt. Raises `BadRequest` for what tokens alone do
    not say."""
    body, served = read.body, read.model.served
    parts = _content_parts(read)
    sampling = sampling_params(body, served.defaults, _structured(read))
    options = body.stream_options if body.stream else None
    several = len(read.prompts) > 1
    return [
        Rendered(
            request_id=f"{read.form.id}-{i}" if several else read.form.id,
            token_ids=list(read.images.unexpanded) if parts else prompt.token_ids,
            sampling_params=sampling,
            model=read.model.name,
            stream=bool(body.stream),
            stream_options=None if options is None else options.model_dump(exclude_none=True),
            cache_salt=body.salt,
            priority=body.priority or 0,
            content_parts=parts or UNSET,
        )
        for i, prompt in enumerate(read.prompts)
    ]


def _content_parts(read: ReadRequest) -> list[dict[str, Any]]:
    """Returns the images of a chat, one for each placeholder. Raises `BadRequest` for what cannot
    be said of them there."""
    body = read.body
    if not read.images.pixels or not isinstance(body, ChatCompletionRequest):
        return []
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if getattr(body, name):
            message = f"{name} is no part of /inference/v1/generate; leave it out"
            raise BadRequest(message, param=name, code="unsupported_parameter")
    places = image_places(body)
    if video := next((place for place in places if place.is_video), None):
        message = "videos are no part of /inference/v1/generate; send them to /v1/chat/completions"
        raise BadRequest(message, param=video.param, code="unsupported_parameter")
    return [{"type": "image_url", "url": place.url} for place in places]


def _structured(read: ReadRequest) -> dict[str, Any] | None:
    """Returns the form of the answers. Raises `BadRequest` for calls, whose form depends on the
    model."""
    body = read.body
    if isinstance(body, ChatCompletionRequest) and read.prompts[0].grammar:
        use = body.tool_use()
        if use.must_call or any(tool.strict for tool in use.tools if use.may_call):
            message = "tools that are strict or must be called are not rendered; leave that out"
            raise BadRequest(message, param="tools", code="unsupported_parameter")
    constraint = find_constraint(body)
    if constraint is None:
        return None
    found = {constraint.kind: constraint.value, "whitespace_pattern": constraint.white_space}
    return {name: value for name, value in found.items() if value is not None}


def asked_as_given(
    body: GenerationBody, answers: Sequence[GivenAnswer], outer: DerenderBody
) -> None:
    """Makes a request ask for what `outer` gives, and for nothing else. Raises `BadRequest`."""
    outer.check_supported()
    body.model = outer.model or body.model
    body.request_id = answers[0].request_id or body.request_id
    for name in ("use_beam_search", "echo"):
        if getattr(body, name, None):
            message = f"{name} is no part of /inference/v1/generate; leave it out"
            raise BadRequest(message, param=name, code="unsupported_parameter")
    if len({len(answer.choices) for answer in answers}) > 1:
        message = "each prompt must have the same number of choices"
        raise BadRequest(message, param="generate_responses")
    body.n = len(answers[0].choices)
    body.stream = None
    body.prompt_logprobs = None


def given(answers: Sequence[GivenAnswer], read: ReadRequest) -> Resume:
    """Returns the answers as those of another node, all at their end. Raises `BadRequest`."""
    if len(answers) != len(read.prompts):
        message = f"there are {len(read.prompts)} prompts, and answers to {len(answers)}"
        raise BadRequest(message, param="generate_responses")
    config = read.model.served.config
    choices = [choice for answer in answers for choice in answer.choices]
    for choice in choices:
        _check(choice, config)
    end_ids = {*config.eos_token_ids, *(read.body.stop_token_ids or ())}
    # All tokens that the client named are given.
    wanted = read.body.wanted_logprobs
    most = None if read.body.logprob_token_ids else wanted
    is_wanted = wanted is not None or bool(read.body.logprob_token_ids)
    resumed = [
        ResumedChoice(
            0,
            one.token_ids,
            _logprobs(one, most) if is_wanted else [],
            end=_end(number, one, end_ids),
        )
        for number, one in enumerate(choices)
    ]
    return Resume(read.form.created, resumed, is_usage_sent=False, num_entries=0)


def as_ended(
    choices: Sequence[Choice], answers: Sequence[GivenAnswer], num_prompt_tokens: Sequence[int]
) -> None:
    """Says the end of each choice as it was given, and how long its prompt was, if that is given:
    by prompt, or of the first one for all."""
    said = [(place, choice) for place, one in enumerate(answers) for choice in one.choices]
    for choice, (place, one) in zip(choices, said, strict=True):
        if num_prompt_tokens:
            is_known = place < len(num_prompt_tokens)
            choice.record.num_prompt_tokens = num_prompt_tokens[place] if is_known else 0
        replay = choice.replay
        if replay is not None and replay.finish_reason == "length":
            replay.finish_reason = one.finish_reason or "stop"


def _end(number: int, choice: GivenChoice, end_ids: Collection[int]) -> End:
    """Returns the end of a choice. One that no stop token ends has text up to its last token, or up
    to a stop text."""
    reason = choice.finish_reason or "stop"
    stop_token = choice.stop_reason if isinstance(choice.stop_reason, int) else None
    has_end = bool(choice.token_ids) and choice.token_ids[-1] in end_ids
    if reason == "stop" and not has_end and stop_token is None:
        reason = "length"
    return End(number, reason, stop_token)


def _logprobs(choice: GivenChoice, most: int | None) -> list[TokenLogprobs]:
    content = choice.logprobs.content if choice.logprobs is not None else None
    return [one.at_its_place(most) for one in content or ()]


def _check(choice: GivenChoice, config: ModelConfig) -> None:
    longest, size = config.max_model_len, config.vocab_size
    if len(choice.token_ids) > longest:
        message = f"token_ids has {len(choice.token_ids)} tokens, more than a context: {longest}"
        raise BadRequest(message, param="token_ids")
    wrong = next((one for one in choice.token_ids if not 0 <= one < size), None)
    if wrong is not None:
        message = f"token_ids names token id {wrong}; this model's ids are 0 to {size - 1}"
        raise BadRequest(message, param="token_ids")
    content = choice.logprobs.content if choice.logprobs is not None else None
    if content and len(content) != len(choice.token_ids):
        message = f"there are {len(choice.token_ids)} tokens and {len(content)} log probabilities"
        raise BadRequest(message, param="logprobs")
    for place in content or ():
        for one in (place, *(place.top_logprobs or ())):
            if not 0 <= one.known_id() < size:
                message = f"logprobs name token id {one.known_id()}; ids are 0 to {size - 1}"
                raise BadRequest(message, param="logprobs")
