"""From a parsed body to an answer: prompts to tokens, choices, usage, timeline.

1. check the model's name and what is asked for
2. tokenise: the only time in the life of a request
3. check against the engine's limits: one `GenerationRequest` for each choice
4. run them, and form the answer
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from decode_node.errors import BadRequest, NotFound
from decode_node.generation import Choice, Generation
from decode_node.metrics import DecodeMetrics
from decode_node.protocol import ChatCompletionRequest, CompletionRequest
from decode_node.proxy import DisaggProxy
from decode_node.response_format import ChatFormat, CompletionFormat, ResponseFormat
from decode_node.sse import EventStreamResponse, JsonResponse
from decode_node.timeline import RequestRecord, Timeline
from engine.config import EngineConfig
from engine.frontend.chat_template import RESERVED_VARIABLES, ChatTemplateError
from engine.frontend.input_processor import InputProcessor, InvalidRequest
from engine.frontend.tokenizer import Tokenizer, TokenizerError

_LONG_TEXT = 16_384
"""Characters from which tokenising has a thread of its own."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What comes with a request besides its body. `prefill_nodes` None: none were named."""

    request_id: str
    received_at: float
    prefill_nodes: list[str] | None = None
    wants_timeline: bool = False


class OpenAIServing:
    """The generating endpoints of the OpenAI API, over one engine."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        proxy: DisaggProxy,
        metrics: DecodeMetrics,
        *,
        max_choices: int,
        send_timeout_s: float,
    ) -> None:
        self._model = config.model
        self._tokenizer = tokenizer
        self._input_processor = InputProcessor(config)
        self._proxy = proxy
        self._metrics = metrics
        self._max_choices = max_choices
        self._send_timeout_s = send_timeout_s
        self._serial = itertools.count()
        """Makes request ids of the engine unique, whatever ids clients send."""

    async def completions(self, body: CompletionRequest, context: RequestContext) -> Response:
        """Raises `ApiError`."""
        self.check_model(body.model)
        body.check_supported()
        prompts = body.prompts()
        self._check_count(body, len(prompts))
        tokens = [await self._encode(p) if isinstance(p, str) else p for p in prompts]
        echoes = [await self._echo(p) if body.echo else "" for p in prompts]
        form = CompletionFormat(
            context.request_id,
            self._model.served_model_name,
            self._tokenizer,
            include_usage=body.include_usage,
            return_token_ids=bool(body.return_token_ids),
        )
        return self._answer(body, self._choices(body, tokens, echoes, context), form, context)

    async def chat(self, body: ChatCompletionRequest, context: RequestContext) -> Response:
        """Raises `ApiError`."""
        self.check_model(body.model)
        body.check_supported()
        self._check_count(body, 1)
        text = await self._render(body)
        tokens = [await self._encode(text, is_rendered=True)]
        form = ChatFormat(
            context.request_id,
            self._model.served_model_name,
            self._tokenizer,
            include_usage=body.include_usage,
            return_token_ids=bool(body.return_token_ids),
        )
        return self._answer(body, self._choices(body, tokens, [""], context), form, context)

    def _answer(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        choices: list[Choice],
        form: ResponseFormat,
        context: RequestContext,
    ) -> Response:
        self._proxy.check_room(len(choices))
        generation = Generation(self._proxy, choices, context.prefill_nodes)

        def headers() -> dict[str, str]:
            return {"x-tandem-prefill-node": generation.prefill_node}

        if body.stream:
            chunks = self._chunks(
                generation, form, body.include_usage, wants_timeline=context.wants_timeline
            )
            return EventStreamResponse(chunks, headers, self._send_timeout_s)
        whole = partial(self._body, generation, form, wants_timeline=context.wants_timeline)
        return JsonResponse(whole, headers)

    async def _chunks(
        self,
        generation: Generation,
        form: ResponseFormat,
        include_usage: bool,
        *,
        wants_timeline: bool,
    ) -> AsyncGenerator[bytes, None]:
        """The timeline rides on the last chunk: the usage chunk, where there is one."""
        running = len(generation.choices)
        try:
            async with aclosing(generation.outputs()) as outputs:
                async for choice, output in outputs:
                    running -= output.finished
                    is_last = running == 0 and not include_usage
                    timeline = _timeline(generation, wants_timeline and is_last)
                    if chunk := form.chunk(choice, output, timeline):
                        yield chunk
            if include_usage:
                yield form.usage_chunk(generation.usage(), _timeline(generation, wants_timeline))
        finally:
            self._metrics.observe(generation.choices)

    async def _body(
        self, generation: Generation, form: ResponseFormat, *, wants_timeline: bool
    ) -> bytes:
        try:
            results = await generation.collect()
            return form.body(results, generation.usage(), _timeline(generation, wants_timeline))
        finally:
            self._metrics.observe(generation.choices)

    def _choices(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        prompts: list[list[int]],
        echoes: list[str],
        context: RequestContext,
    ) -> list[Choice]:
        """Choice `i` of a prompt draws with seed + i, so that they differ."""
        sampling = body.sampling()
        choices: list[Choice] = []
        for prompt, echo in zip(prompts, echoes, strict=True):
            for i in range(body.num_choices):
                try:
                    request = self._input_processor.process(
                        f"{context.request_id}-{next(self._serial)}",
                        prompt,
                        sampling,
                        max_tokens=body.wanted_max_tokens,
                        seed=None if body.seed is None else body.seed + i,
                        priority=body.priority or 0,
                        cache_salt=body.cache_salt or "",
                    )
                except InvalidRequest as error:
                    raise BadRequest.from_invalid(error) from None
                request.arrival_time = context.received_at
                record = RequestRecord(
                    num_prompt_tokens=len(prompt),
                    max_tokens=request.sampling.max_tokens,
                    received_at=context.received_at,
                )
                choices.append(Choice(len(choices), request, record, i == 0, echo))
        return choices

    async def _render(self, body: ChatCompletionRequest) -> str:
        variables = body.chat_template_kwargs or {}
        if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
            raise BadRequest(
                f"chat_template_kwargs may not set {', '.join(reserved)}",
                param="chat_template_kwargs",
            )
        messages = [message.for_template() for message in body.messages]
        render = partial(
            self._tokenizer.apply_chat_template,
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
        )
        length = sum(len(message.get("content", "")) for message in messages)
        try:
            return await asyncio.to_thread(render) if length > _LONG_TEXT else render()
        except (ChatTemplateError, TokenizerError) as error:
            raise BadRequest(str(error), param="messages") from None

    async def _encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        """A rendered chat has its special tokens written out."""
        self._check_length(text)
        encode = partial(self._tokenizer.encode, text, add_special_tokens=not is_rendered)
        try:
            return await asyncio.to_thread(encode) if len(text) > _LONG_TEXT else encode()
        except TypeError:
            raise BadRequest("the text holds half a surrogate pair", param="prompt") from None

    async def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _check_length(self, text: str) -> None:
        """No text of so many characters fits; say so before spending seconds on it."""
        context = self._model.max_model_len
        if len(text) > context * self._tokenizer.max_token_length:
            raise BadRequest(
                f"this model's context is {context} tokens and the prompt has "
                f"{len(text)} characters, which is far more; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )

    def check_model(self, name: str | None) -> None:
        """Raises `NotFound`."""
        served = self._model.served_model_name
        if name not in (None, served):
            raise NotFound(
                f"the model {name!r} does not exist; this server has {served!r}",
                param="model",
                code="model_not_found",
            )

    def _check_count(self, body: CompletionRequest | ChatCompletionRequest, prompts: int) -> None:
        n = body.num_choices
        if n < 1 or n * prompts > self._max_choices:
            raise BadRequest(
                f"n times the number of prompts must be 1 to {self._max_choices}, not "
                f"{n} times {prompts}",
                param="n",
            )


def _timeline(generation: Generation, wanted: bool) -> Timeline | UnsetType:
    return generation.timeline() if wanted else UNSET
