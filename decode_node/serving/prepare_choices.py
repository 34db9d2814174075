"""Prepares what the engine is asked for: the envelope of each prompt, made once and checked against
the engine's limits, and a `GenerationRequest` for each choice. Choices that another node began go
on from where it left them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from decode_node.answer.choice import Choice
from decode_node.answer.journal import Resume, ResumedChoice
from decode_node.observe.timeline import RequestRecord
from decode_node.protocol.bodies.generation_body import GenerationBody
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.serving.read_request import ReadPrompt, ReadRequest
from decode_node.serving.request_context import RequestContext
from decode_node.serving.served_model import ServedModel
from edge.http.errors import BadRequest
from edge.http.event_loop import long_work
from engine.config import EngineConfig
from engine.contracts.errors import InvalidRequest
from engine.contracts.request_spec import RequestSpec
from engine.frontend.input_processor import GenerationRequest, InputProcessor, choose_seed
from engine.frontend.output_processor import OutputProcessor, RequestOutput

_LONG_ANSWER = 1 << 13
"""Tokens whose text takes some 40 ms to find again: this happens beside the event loop."""


class ChoicePreparer:
    """Prepares requests for one engine. `cuts_answers`: as `InputProcessor` has it."""

    def __init__(self, config: EngineConfig, *, cuts_answers: bool = False) -> None:
        self._input_processor = InputProcessor(config, cuts_answers=cuts_answers)
        self._serial = itertools.count()
        """Makes request ids of the engine unique, whatever ids clients send."""

    async def choices(self, read: ReadRequest, context: RequestContext) -> list[Choice]:
        """Returns the choices, prompt by prompt; choice `i` of each draws with seed + i. Other
        requests come in between the choices of a long one. Raises `BadRequest`."""
        body = read.body
        resumed = _resumed_choices(context.resume, len(read.prompts) * body.num_choices)
        bare = await self._spec(read, context)
        choices: list[Choice] = []
        for number, prompt in enumerate(read.prompts):
            place = context.place_of(number)
            spec = bare.with_prompt(prompt.token_ids).with_prefix_hash(place.prefix_hash)
            spec = spec.with_images(read.images.spans)
            spec = spec.with_sampling(grammar=prompt.grammar)
            spec = await long_work.run(context.is_long, partial(self._complete, read, spec))
            if not resumed:
                read.model.served.limits.check_answer(body, spec, len(read.prompts))
            for i in range(body.num_choices):
                begun = resumed[len(choices)] if resumed else None
                make = partial(self._request, read, spec, i, begun, context)
                request = await long_work.run(context.is_long and begun is not None, make)
                request.prefix_holder = place.prefix_holder
                choice = _choice(read, prompt, request, len(choices), is_first=i == 0)
                choice.prefill_nodes = place.prefill_nodes
                if begun is not None:
                    take_over = partial(_take_over, choice, begun, read.model.served)
                    await long_work.run(len(begun.token_ids) >= _LONG_ANSWER, take_over)
                choices.append(choice)
                if context.is_long:
                    await asyncio.sleep(0)
        return choices

    async def _spec(self, read: ReadRequest, context: RequestContext) -> RequestSpec:
        """Makes the envelope of the request, without a prompt: the only place where one is made.
        Raises `BadRequest`."""
        body, model = read.body, read.model
        make = partial(body.sampling, model.served.tokenizer.encode_all, model.served.defaults)
        with _as_bad_request(body):
            return RequestSpec(
                sampling=await long_work.run(context.is_long, make),
                priority=body.priority or 0,
                cache_salt=_salt(context.cache_salt, body.salt or ""),
                adapter=model.adapter,
            )

    def _complete(self, read: ReadRequest, spec: RequestSpec) -> RequestSpec:
        max_tokens = _max_tokens(read.body, spec, read.model.served)
        with _as_bad_request(read.body):
            return self._input_processor.complete(spec, max_tokens=max_tokens)

    def _request(
        self,
        read: ReadRequest,
        spec: RequestSpec,
        index: int,
        begun: ResumedChoice | None,
        context: RequestContext,
    ) -> GenerationRequest:
        if begun is None:
            spec = spec.ranked(index).with_sampling(seed=choose_seed(read.body.seed, index))
        else:
            spec = self._complete(read, _continued(spec, begun))
        name = f"{context.request_id}-{next(self._serial)}"
        request = self._input_processor.request(name, spec)
        request.text = read.body.text_options
        request.reader = read.reader
        request.pixels = read.images.pixels
        request.arrival_time = context.received_at
        request.trace = context.trace.sibling() if context.trace is not None else None
        return request


def _choice(
    read: ReadRequest,
    prompt: ReadPrompt,
    request: GenerationRequest,
    index: int,
    *,
    is_first: bool,
) -> Choice:
    is_chat = isinstance(read.body, ChatCompletionRequest)
    record = RequestRecord(
        num_prompt_tokens=len(prompt.token_ids),
        max_tokens=request.spec.sampling.max_tokens,
        operation="chat" if is_chat else "text_completion",
        received_at=request.arrival_time,
    )
    return Choice(
        index,
        request,
        record,
        is_first_of_prompt=is_first,
        prompt_text=prompt.echo,
        echoes_logprobs=read.body.echoes_logprobs,
        is_prompt_only=read.body.is_prompt_only,
        is_cut=record.max_tokens < (read.body.wanted_max_tokens or 0),
    )


def _max_tokens(body: GenerationBody, spec: RequestSpec, served: ServedModel) -> int | None:
    """Returns what the request asks for, else the model's usual length, if there is room."""
    asked, usual = body.wanted_max_tokens, served.defaults.max_new_tokens
    if asked is not None or usual is None:
        return asked
    return max(1, min(usual, served.config.max_model_len - spec.num_own_prompt_tokens))


@contextmanager
def _as_bad_request(body: GenerationBody) -> Iterator[None]:
    """Turns what the engine's edge refuses into an answer to the client: it is the client's
    mistake, in a field of `body`."""
    try:
        yield
    except InvalidRequest as error:
        name, message = error.param or "", error.message
        param = body.param_name(name)
        if message.startswith(f"{name} "):
            message = param + message.removeprefix(name)
        raise BadRequest(message, param=param or None, code=error.code) from None


def _resumed_choices(resume: Resume | None, num_choices: int) -> list[ResumedChoice]:
    if resume is None:
        return []
    if len(resume.choices) != num_choices:
        raise BadRequest("what to resume belongs to another request", param="resume")
    return resume.choices


def _continued(spec: RequestSpec, begun: ResumedChoice) -> RequestSpec:
    """Returns `spec` from where another node left this choice."""
    spec = spec.with_sampling(seed=begun.seed)
    if begun.token_ids or begun.end:
        # The client has them.
        spec = spec.with_sampling(prompt_logprobs=None)
    return spec if begun.end else spec.resumed_after(begun.token_ids)


def _take_over(choice: Choice, begun: ResumedChoice, served: ServedModel) -> None:
    choice.num_cached = begun.num_cached
    choice.resumed_logprobs = begun.logprobs or None
    if begun.end is None:
        if begun.token_ids:
            choice.when_aborted = partial(_begun_and_aborted, choice.request, served)
        return
    # A stop string is found again in the text; other ends have to be passed on.
    is_found = isinstance(begun.end.stop_reason, str)
    choice.replay = OutputProcessor(choice.request, served.tokenizer).process(
        begun.token_ids,
        choice.resumed_logprobs,
        finish_reason="" if is_found else begun.end.finish_reason,
        stop_reason=begun.end.stop_reason,
    )
    choice.replay.is_replay = True


def _begun_and_aborted(request: GenerationRequest, served: ServedModel) -> Iterator[RequestOutput]:
    """Yields what another node gave, and the end, with text that waited for more."""
    processor = OutputProcessor(request, served.tokenizer)
    yield processor.replay(request.spec.resumed_token_ids)
    yield processor.process([], finish_reason="abort")


def _salt(tenant: str, own: str) -> str:
    return f"{tenant}/{own}" if tenant else own
