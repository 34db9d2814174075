"""Serves the generating endpoints of all APIs, over one engine.

1. read       the model is resolved, the prompt tokenised, the form of the answer chosen
              (`read_request.py`). APIs other than completions amount to a chat
2. prepare    one checked `GenerationRequest` for each choice (`prepare_choices.py`)
3. respond    run them, and send the answer (`respond.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.responses import Response

from decode_node.answer.chat_format import ChatFormat
from decode_node.answer.messages.messages_format import MessagesFormat
from decode_node.answer.responses.responses_format import (
    CompactedFormat,
    ResponsesFormat,
    SummaryFormat,
)
from decode_node.answer.tokens.generate_format import GenerateFormat
from decode_node.answer.tokens.sglang_format import SGLangFormat
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from decode_node.protocol.decisions.decisions import DecisionRequest
from decode_node.protocol.messages.messages import MessagesRequest
from decode_node.protocol.responses.responses import CompactRequest, ResponsesRequest
from decode_node.protocol.tokens.derender import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    GivenAnswer,
)
from decode_node.protocol.tokens.generate import GenerateRequest
from decode_node.protocol.tokens.rendered import Rendered
from decode_node.protocol.tokens.sglang import SGLangRequest
from decode_node.serving.decisions.read_decisions import DecisionReader
from decode_node.serving.prepare_choices import ChoicePreparer
from decode_node.serving.read_request import MakeFormat, ReadRequest, RequestReader
from decode_node.serving.rendering import as_ended, asked_as_given, given, rendered
from decode_node.serving.request_context import RequestContext
from decode_node.serving.respond import Responder
from edge.http.event_loop import long_work


class OpenAIServing:
    """Leads from a parsed body to its answer: OpenAI's APIs, Anthropic's Messages, and tokens
    as vLLM and SGLang take them."""

    def __init__(
        self, reader: RequestReader, preparer: ChoicePreparer, responder: Responder
    ) -> None:
        self._reader = reader
        self._decisions = DecisionReader(reader)
        self._served = reader.served
        self._preparer = preparer
        self._responder = responder

    async def completions(self, body: CompletionRequest, context: RequestContext) -> Response:
        """Completes prompts. Raises `HttpError`."""
        return await self._answer(await self._reader.completion(body, context), context)

    async def rendered_chat(self, body: ChatCompletionRequest, context: RequestContext) -> Rendered:
        """Returns a chat as a request for tokens, once it is known that it would be answered.
        Raises `HttpError`."""
        read = await self._reader.chat(body, context, ChatFormat)
        await self._preparer.choices(read, context)
        (found,) = rendered(read)
        return found

    async def rendered_other(
        self, body: MessagesRequest | ResponsesRequest, context: RequestContext
    ) -> Rendered:
        """Returns the same of a chat in the shape of another API. Raises `HttpError`."""
        with body.named_fields():
            chat = await long_work.run(context.is_long, body.to_chat)
            return await self.rendered_chat(chat, context)

    async def rendered_completions(
        self, body: CompletionRequest, context: RequestContext
    ) -> list[Rendered]:
        """Returns the same of texts, each by itself. Raises `HttpError`."""
        read = await self._reader.completion(body, context)
        await self._preparer.choices(read, context)
        return rendered(read)

    async def derendered_chat(self, body: DerenderChatRequest, context: RequestContext) -> Response:
        """Answers a chat with tokens that exist. Raises `HttpError`."""
        chat, answers = body.chat_request, [body.generate_response]
        asked_as_given(chat, answers, body)
        read = await self._reader.chat(chat, context, ChatFormat)
        return await self._given(read, answers, body.counts, context)

    async def derendered_completions(
        self, body: DerenderCompletionRequest, context: RequestContext
    ) -> Response:
        """Answers prompts with tokens that exist. Raises `HttpError`."""
        request, answers = body.completion_request, body.generate_responses
        asked_as_given(request, answers, body)
        read = await self._reader.completion(request, context)
        return await self._given(read, answers, body.counts, context)

    async def generate(self, body: GenerateRequest, context: RequestContext) -> Response:
        """Continues a prompt of token ids. Raises `HttpError`."""
        with body.named_fields():
            make = partial(GenerateFormat, has_text=body.has_text)
            read = await self._reader.completion(body.to_completion(), context, make)
            return await self._answer(read, context)

    async def native(self, body: SGLangRequest, context: RequestContext) -> Response:
        """Continues texts or token ids, as SGLang's own API does. Raises `HttpError`."""
        with body.named_fields():
            make = partial(SGLangFormat, asked=body)
            read = await self._reader.completion(body.to_completion(), context, make)
            return await self._answer(read, context)

    async def chat(self, body: ChatCompletionRequest, context: RequestContext) -> Response:
        """Answers a chat. Raises `HttpError`."""
        return await self._answer(await self._reader.chat(body, context, ChatFormat), context)

    async def responses(self, body: ResponsesRequest, context: RequestContext) -> Response:
        """Answers a request of the Responses API. Raises `HttpError`."""
        with body.named_fields():
            make = self._response_form(body, context)
            chat = await long_work.run(context.is_long, body.to_chat)
            read = await self._reader.chat(chat, context, make)
            return await self._answer(read, context)

    async def compact(self, body: CompactRequest, context: RequestContext) -> Response:
        """Sums a conversation up. Raises `HttpError`."""
        with body.named_fields():
            chat = await long_work.run(context.is_long, body.to_chat)
            said = {"said": body.user_messages()}
            make = partial(CompactedFormat, echoed_fields=said, tools=body.read_tools)
            return await self._answer(await self._reader.chat(chat, context, make), context)

    async def check_response(self, body: ResponsesRequest, context: RequestContext) -> int:
        """Returns the number of tokens of the prompt of a request that would be answered. Raises
        `HttpError` for one that would not."""
        with body.named_fields():
            make = self._response_form(body, context)
            chat = await long_work.run(context.is_long, body.to_chat)
            read = await self._reader.chat(chat, context, make)
            first, *_ = await self._preparer.choices(read, context)
            return first.request.spec.num_own_prompt_tokens

    async def messages(self, body: MessagesRequest, context: RequestContext) -> Response:
        """Answers a request of Anthropic's Messages API. Raises `HttpError`."""
        with body.named_fields():
            chat = await long_work.run(context.is_long, body.to_chat)
            read = await self._reader.chat(chat, context, MessagesFormat)
            return await self._answer(read, context)

    async def decisions(self, body: DecisionRequest, context: RequestContext) -> Response:
        """Answers questions about an input by probabilities. Raises `HttpError`."""
        with body.named_fields():
            return await self._answer(await self._decisions.read(body, context), context)

    async def _answer(self, read: ReadRequest, context: RequestContext) -> Response:
        await long_work.pause()
        choices = await self._preparer.choices(read, context)
        await long_work.pause()
        return self._responder.response(read, choices, context)

    async def _given(
        self,
        read: ReadRequest,
        answers: Sequence[GivenAnswer],
        num_prompt_tokens: Sequence[int],
        context: RequestContext,
    ) -> Response:
        resume = await long_work.run(context.is_long, partial(given, answers, read))
        context = replace(context, resume=resume, wants_journal=False)
        choices = await self._preparer.choices(read, context)
        as_ended(choices, answers, num_prompt_tokens)
        return self._responder.response(read, choices, context)

    def _response_form(self, body: ResponsesRequest, context: RequestContext) -> MakeFormat:
        echoed_fields = body.echoed_fields(self._served.defaults)
        return partial(
            SummaryFormat if body.asks_summary else ResponsesFormat,
            echoed_fields=echoed_fields,
            tools=body.read_tools,
            kept=context.kept,
        )
