"""Leads from a parsed body to an answer: prompts to tokens, choices, usage, timeline.

1. check the model's name and what is asked for
2. tokenise: the only time in the life of a request
3. check against the engine's limits: one `GenerationRequest` for each choice
4. run them, and form the answer
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from starlette.responses import Response

from decode_node.answer.answer import Answer
from decode_node.answer.chat_format import ChatFormat, ChatOptions
from decode_node.answer.completion_format import CompletionFormat
from decode_node.answer.format import FormatOptions, ResponseFormat
from decode_node.answer.generation import Choice, Generation
from decode_node.answer.journal import JournalWriter, Resume, ResumedChoice
from decode_node.answer.messages_format import MessagesFormat
from decode_node.answer.responses_format import ResponsesFormat
from decode_node.answer.sse import (
    EventStreamResponse,
    JournaledResponse,
    JsonResponse,
    Liveness,
)
from decode_node.disagg.prefill_headers import prefill_headers
from decode_node.disagg.proxy import DisaggProxy
from decode_node.grammar.answer_grammars import AnswerGrammars
from decode_node.images.image_parts import NO_IMAGES, ImagePrompt
from decode_node.images.image_reader import ImageReader
from decode_node.metrics import DecodeMetrics
from decode_node.observe.timeline import RequestRecord
from decode_node.protocol.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from decode_node.protocol.generation_body import GenerationBody
from decode_node.protocol.messages import MessagesRequest
from decode_node.protocol.responses import ResponsesRequest
from decode_node.serving.ask_limits import AskLimits
from decode_node.serving.chat_grammar import ChatGrammar
from decode_node.serving.chat_reading import ChatReading
from decode_node.serving.image_prompts import ImagePrompts
from decode_node.serving.model_cards import ServedModel
from decode_node.serving.prompts import Prompts
from decode_node.serving.request_context import RequestContext
from edge.http import headers as names
from edge.http import long_work
from edge.http.errors import BadRequest
from edge.http.load_report import load_headers
from engine.config import EngineConfig
from engine.contracts.errors import InvalidRequest
from engine.contracts.request_spec import RequestSpec
from engine.frontend.input_processor import GenerationRequest, InputProcessor, choose_seed
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.tokenizer import Tokenizer
from engine.frontend.visible_text import PieceReader
from engine.models.sampling_defaults import NO_DEFAULTS, SamplingDefaults

MakeFormat = Callable[[str, str, Tokenizer, FormatOptions, ChatOptions], ResponseFormat]


class OpenAIServing:
    """Serves the generating endpoints of the OpenAI API, over one engine."""

    def __init__(
        self,
        config: EngineConfig,
        served: ServedModel,
        tokenizer: Tokenizer,
        proxy: DisaggProxy,
        metrics: DecodeMetrics,
        *,
        limits: AskLimits,
        liveness: Liveness,
        reading: ChatReading,
        grammars: AnswerGrammars,
        images: ImageReader,
        trusts_templates: bool = False,
        forces_usage: bool = False,
        sanitizes: bool = False,
        moves_system_turns: bool = True,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self._model = config.model
        self._served = served
        self._tokenizer = tokenizer
        self.prompts = Prompts(
            config.model,
            tokenizer,
            trusts_templates=trusts_templates,
            sanitizes=sanitizes,
            moves_system_turns=moves_system_turns,
        )
        self._input_processor = InputProcessor(config)
        self._proxy = proxy
        self._metrics = metrics
        self._limits = limits
        self._defaults = defaults
        self._forces_usage = forces_usage
        self._liveness = liveness
        self._reading = reading
        self._grammars = grammars
        self.images = ImagePrompts(images, config.model.vision)
        self._chat_grammar = ChatGrammar(grammars, reading.parsers, config.model.eos_token_ids)
        self._serial = itertools.count()
        """Makes request ids of the engine unique, whatever ids clients send."""

    async def completions(self, body: CompletionRequest, context: RequestContext) -> Response:
        """Completes prompts. Raises `HttpError`."""
        self._served.check(context.model or body.model, context.adapter_digest)
        body.check_supported()
        self._limits.check(body, body.num_prompts)
        tokens, echoes = await self.prompts.of_texts(body, is_long=context.is_long)
        form = CompletionFormat(*self._format(body, context))
        states = [self._reading.state_of_tokens(prompt) for prompt in tokens]
        known = {s: await self._grammars.of_fields(body, s) for s in set(states)}
        grammars = [known[state] for state in states]
        choices = await self._choices(body, tokens, echoes, grammars, context)
        return self._answer(body, choices, form, context)

    async def chat(self, body: ChatCompletionRequest, context: RequestContext) -> Response:
        """Answers a chat. Raises `HttpError`."""
        return await self._chat(body, context, ChatFormat)

    async def responses(self, body: ResponsesRequest, context: RequestContext) -> Response:
        """Answers a request of the Responses API. Raises `HttpError`."""
        with body.named_fields():
            return await self._chat(body.to_chat(), context, self._response_form(body, context))

    async def check_response(self, body: ResponsesRequest, context: RequestContext) -> int:
        """Returns the number of tokens of the prompt of a request that would be answered. Raises
        `HttpError` for one that would not."""
        with body.named_fields():
            make = self._response_form(body, context)
            choices, _ = await self._asked(body.to_chat(), context, make)
            return choices[0].request.spec.num_own_prompt_tokens

    def _response_form(self, body: ResponsesRequest, context: RequestContext) -> MakeFormat:
        told_back = body.told_back(self._defaults)
        return partial(
            ResponsesFormat, told_back=told_back, tools=body.read_tools, kept=context.kept
        )

    async def messages(self, body: MessagesRequest, context: RequestContext) -> Response:
        """Answers a request of Anthropic's Messages API. Raises `HttpError`."""
        with body.named_fields():
            chat = body.to_chat()
            if self._reading.parsers.reasoning_format is None:
                # This API has no thinking without a budget, and no thinking is within any.
                chat.thinking_token_budget = None
            return await self._chat(chat, context, MessagesFormat)

    async def _chat(
        self, body: ChatCompletionRequest, context: RequestContext, make: MakeFormat
    ) -> Response:
        """Answers what amounts to a chat; `make` forms the answer."""
        choices, form = await self._asked(body, context, make)
        return self._answer(body, choices, form, context)

    async def _asked(
        self, body: ChatCompletionRequest, context: RequestContext, make: MakeFormat
    ) -> tuple[list[Choice], ResponseFormat]:
        """Returns what the engine is asked for a chat, and the form of the answer."""
        self._served.check(context.model or body.model, context.adapter_digest)
        body.check_supported()
        self._limits.check(body, 1)
        tool_use = body.tool_use()
        self._reading.check(tool_use)
        images = await self.images.read(body)
        text, tokens = await self.prompts.of_chat(body, tool_use, is_long=context.is_long)
        prompt = self.images.with_images(body, tokens, images)
        form = make(*self._format(body, context), self._reading.options(body, tool_use, text))
        reader = self._reading.reader(body, tool_use, text)
        state = self._reading.reasoning_state(body, text)
        grammar = await self._chat_grammar.of_chat(body, tool_use, state)
        prompts = [prompt.token_ids]
        choices = await self._choices(body, prompts, [""], [grammar], context, reader, prompt)
        return choices, form

    def _format(
        self, body: CompletionRequest | ChatCompletionRequest, context: RequestContext
    ) -> tuple[str, str, Tokenizer, FormatOptions]:
        """Returns what every format is made of."""
        if self._forces_usage:
            body.force_usage()
        options = FormatOptions(
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            return_token_ids=bool(body.return_token_ids),
            return_prompt_logprobs=body.prompt_logprobs is not None,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            has_named_logprobs=bool(body.logprob_token_ids),
        )
        name = body.request_id or context.request_id
        adapter = self._served.check(context.model or body.model, context.adapter_digest)
        own = self._model.served_model_name if adapter is None else adapter.name
        model = (context.model and body.model) or own
        return name, model, self._tokenizer, options

    def _answer(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        choices: list[Choice],
        form: ResponseFormat,
        context: RequestContext,
    ) -> Response:
        self._proxy.check_room(len(choices))
        generation = Generation(self._proxy, choices, context.prefill_nodes)
        resume = context.resume
        if resume is not None:
            form.take_over(resume)
        journal = None
        if context.wants_journal:
            journal = _journal(resume, form.created, choices, is_stream=bool(body.stream))
        answer = Answer(
            generation,
            form,
            self._metrics,
            journal,
            include_usage=body.include_usage,
            is_usage_told=resume is not None and resume.is_usage_told,
            wants_timeline=context.wants_timeline,
            wants_metrics=bool(body.include_metrics),
        )

        def headers() -> dict[str, str]:
            known = prefill_headers(generation.choices[0].record)
            known |= load_headers(context.load_format, self._proxy)
            return known if journal is None else known | {names.JOURNAL: str(journal.first_number)}

        if journal is not None:
            return JournaledResponse(
                answer.stream if body.stream else answer.stream_body,
                form,
                headers,
                self._liveness,
                is_whole=not body.stream,
            )
        if body.stream:
            liveness = self._liveness.with_keepalives(context.wants_keepalives)
            return EventStreamResponse(answer.stream, form, headers, liveness)
        return JsonResponse(answer.body, form, headers)

    async def _choices(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        prompts: list[list[int]],
        echoes: list[str],
        grammars: list[str],
        context: RequestContext,
        reader: PieceReader | None = None,
        images: ImagePrompt = NO_IMAGES,
    ) -> list[Choice]:
        """Forms the envelope of each prompt once; choice `i` draws with seed + i. Other requests
        come in between the choices of a long one."""
        resumed = _resumed_choices(context.resume, len(prompts) * body.num_choices)
        bare = await self._spec(body, context)
        choices: list[Choice] = []
        for prompt, echo, grammar in zip(prompts, echoes, grammars, strict=True):
            spec = bare.with_prompt(prompt).with_images(images.spans)
            spec = spec.with_sampling(grammar=grammar)
            spec = self._complete(body, spec)
            for i in range(body.num_choices):
                begun = resumed[len(choices)] if resumed else None
                request = self._request(body, spec, i, begun, context)
                request.reader = reader
                request.pixels = images.pixels
                record = RequestRecord(
                    num_prompt_tokens=len(prompt),
                    max_tokens=request.spec.sampling.max_tokens,
                    operation="chat"
                    if isinstance(body, ChatCompletionRequest)
                    else "text_completion",
                    received_at=context.received_at,
                )
                choice = Choice(
                    len(choices),
                    request,
                    record,
                    is_first_of_prompt=i == 0,
                    prompt_text=echo,
                    echoes_logprobs=body.echoes_logprobs,
                    is_prompt_only=body.is_prompt_only,
                )
                if begun is not None:
                    self._take_over(choice, begun)
                choices.append(choice)
                if context.is_long:
                    await asyncio.sleep(0)
        return choices

    async def _spec(
        self, body: CompletionRequest | ChatCompletionRequest, context: RequestContext
    ) -> RequestSpec:
        """Makes the envelope of the request, without a prompt: the only place where one is made.
        Raises `BadRequest`."""
        make = partial(body.sampling, self._tokenizer.encode_all, self._defaults)
        with _as_bad_request(body):
            return RequestSpec(
                sampling=await long_work.run(context.is_long, make),
                priority=body.priority or 0,
                cache_salt=_salt(context.cache_salt, body.cache_salt or ""),
                adapter=self._served.check(context.model or body.model, context.adapter_digest),
                prefix_hash=context.prefix_hash,
            )

    def _complete(
        self, body: CompletionRequest | ChatCompletionRequest, spec: RequestSpec
    ) -> RequestSpec:
        with _as_bad_request(body):
            return self._input_processor.complete(spec, max_tokens=self._max_tokens(body, spec))

    def _max_tokens(self, body: GenerationBody, spec: RequestSpec) -> int | None:
        """Returns what the request asks for, else the model's usual length, if there is room."""
        asked, usual = body.wanted_max_tokens, self._defaults.max_new_tokens
        if asked is not None or usual is None:
            return asked
        return max(1, min(usual, self._model.max_model_len - spec.num_own_prompt_tokens))

    def _request(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        spec: RequestSpec,
        index: int,
        begun: ResumedChoice | None,
        context: RequestContext,
    ) -> GenerationRequest:
        if begun is None:
            spec = spec.ranked(index).with_sampling(seed=choose_seed(body.seed, index))
        else:
            spec = self._complete(body, _continued(spec, begun))
        name = f"{context.request_id}-{next(self._serial)}"
        request = self._input_processor.request(name, spec)
        request.text = body.text_options
        request.arrival_time = context.received_at
        request.prefix_holder = context.prefix_holder
        request.trace = context.trace.sibling() if context.trace is not None else None
        return request

    def _take_over(self, choice: Choice, begun: ResumedChoice) -> None:
        choice.num_cached = begun.num_cached
        choice.resumed_logprobs = begun.logprobs or None
        if begun.end is None:
            return
        # A stop string is found again in the text; other ends have to be passed on.
        is_found = isinstance(begun.end.stop_reason, str)
        choice.replay = OutputProcessor(choice.request, self._tokenizer).process(
            begun.token_ids,
            choice.resumed_logprobs,
            finish_reason="" if is_found else begun.end.finish_reason,
            stop_reason=begun.end.stop_reason,
        )
        choice.replay.is_replay = True


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


def _journal(
    resume: Resume | None, created: int, choices: list[Choice], *, is_stream: bool
) -> JournalWriter:
    if resume is not None:
        return JournalWriter(resume.num_entries, keeps_logprobs=not is_stream)
    journal = JournalWriter(keeps_logprobs=not is_stream)
    journal.start(created, [choice.request.spec.sampling.seed for choice in choices])
    return journal


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


def _salt(tenant: str, own: str) -> str:
    return f"{tenant}/{own}" if tenant else own
