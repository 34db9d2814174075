"""Reads what a body asks for: its model, its prompts as tokens, and the form of its answer.

1. resolve the model, check what is asked for
2. tokenise: the only time in the life of a request
3. make the grammar of the answer, and what reads it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from decode_node.answer.chat_format import ChatOptions
from decode_node.answer.completion_format import CompletionFormat
from decode_node.answer.format import FormatOptions, ResponseFormat
from decode_node.answer.journal import digest_of
from decode_node.errors import Unavailable
from decode_node.grammar.answer_grammars import AnswerGrammars
from decode_node.images.image_parts import NO_IMAGES, ImagePrompt
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from decode_node.serving.chat_grammar import ChatGrammar
from decode_node.serving.request_context import RequestContext
from decode_node.serving.served_model import RequestModel, ServedModel
from edge.http.event_loop import long_work
from engine.frontend.templates.chat_template import rendered_at
from engine.frontend.text.visible_text import PieceReader
from engine.frontend.tokenizer import Tokenizer

Body: TypeAlias = CompletionRequest | ChatCompletionRequest
MakeFormat: TypeAlias = Callable[[str, str, Tokenizer, FormatOptions, ChatOptions], ResponseFormat]
"""Makes the form of the answer to what amounts to a chat."""
MakeTokenFormat: TypeAlias = Callable[[str, str, Tokenizer, FormatOptions], ResponseFormat]
"""Makes the form of the answer to what amounts to a completion."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """One prompt. `echo`: its text, where the answer repeats it; `grammar`: of its answers; ""
    for free ones."""

    token_ids: list[int]
    grammar: str
    echo: str = ""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Holds what a body asks for.

    Attributes:
        reader: Reads the outputs for their stop strings; None: nothing reads pieces.
        images: Of the only prompt.
        prompt_digest: Tells the prompts from others, where the answer may move; else empty.
    """

    body: Body
    model: RequestModel
    prompts: list[ReadPrompt]
    form: ResponseFormat
    reader: PieceReader | None = None
    images: ImagePrompt = NO_IMAGES
    prompt_digest: str = ""


class RequestReader:
    """Reads requests for one model. `forces_usage`: all streams end with their usage."""

    def __init__(
        self, served: ServedModel, grammars: AnswerGrammars, *, forces_usage: bool = False
    ) -> None:
        self.served = served
        self._grammars = grammars
        self._forces_usage = forces_usage
        parsers, end_ids = served.reading.parsers, served.config.eos_token_ids
        self._chat_grammar = ChatGrammar(grammars, parsers, end_ids)

    async def completion(
        self,
        body: CompletionRequest,
        context: RequestContext,
        make: MakeTokenFormat = CompletionFormat,
    ) -> ReadRequest:
        """Reads a request to complete prompts; `make` makes the form of the answer. Raises
        `HttpError`."""
        model = self._model(body, context, body.num_prompts)
        served = model.served
        images = await served.images.read_of_text(body)
        tokens, echoes = await served.prompts.of_texts(body, is_long=context.is_long)
        prompt = served.images.with_images(body, tokens[0], images)
        tokens[0] = prompt.token_ids
        form = make(*self._format(body, context, model))
        states = [served.reading.state_of_tokens(prompt) for prompt in tokens]
        grammars = {s: await self._grammars.of_fields(body, s) for s in set(states)}
        prompts = [
            ReadPrompt(token_ids, grammars[state], echo)
            for token_ids, state, echo in zip(tokens, states, echoes, strict=True)
        ]
        digest = await _digest(prompts, context)
        return ReadRequest(body, model, prompts, form, images=prompt, prompt_digest=digest)

    async def chat(
        self, body: ChatCompletionRequest, context: RequestContext, make: MakeFormat
    ) -> ReadRequest:
        """Reads what amounts to a chat; `make` makes the form of the answer. Raises
        `HttpError`."""
        model = self._model(body, context, 1)
        served, reading = model.served, model.served.reading
        tool_use = body.tool_use()
        reading.check_reasoning(body)
        reading.check(tool_use)
        images = await served.images.read(body)
        with rendered_at(context.created):
            text, tokens = await served.prompts.of_chat(body, tool_use, is_long=context.is_long)
        prompt = served.images.with_images(body, tokens, images)
        form = make(*self._format(body, context, model), reading.options(body, tool_use, text))
        reader = reading.reader(body, tool_use, text)
        state = reading.reasoning_state(body, text)
        grammar = await self._chat_grammar.of_chat(body, tool_use, state)
        prompts = [ReadPrompt(prompt.token_ids, grammar)]
        digest = await _digest(prompts, context)
        return ReadRequest(body, model, prompts, form, reader, prompt, digest)

    def _model(self, body: Body, context: RequestContext, num_prompts: int) -> RequestModel:
        """Returns the model, once it may be asked for this. Raises `HttpError`."""
        model = self.served.of_request(body.model, context.model, context.adapter_digest)
        body.check_supported()
        model.served.limits.check(body, num_prompts)
        return model

    def _format(
        self, body: Body, context: RequestContext, model: RequestModel
    ) -> tuple[str, str, Tokenizer, FormatOptions]:
        """Returns what every format is made of."""
        if self._forces_usage:
            body.force_usage()
        options = FormatOptions(
            created=context.created,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            return_token_ids=bool(body.return_token_ids),
            return_prompt_logprobs=body.prompt_logprobs is not None,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            has_named_logprobs=bool(body.logprob_token_ids),
            fingerprint=model.served.fingerprint,
        )
        return body.given_name or context.request_id, model.name, model.served.tokenizer, options


async def _digest(prompts: list[ReadPrompt], context: RequestContext) -> str:
    """Returns the digest of what an answer is about to begin behind, or has begun behind. Raises
    `Unavailable` where another node has begun it behind other tokens: its chat template or its
    tokenizer is another one, and the answer would be that of no prompt."""
    resume = context.resume
    if not (context.wants_journal or (resume is not None and resume.prompts)):
        return ""
    make = partial(digest_of, [prompt.token_ids for prompt in prompts])
    digest = await long_work.run(context.is_long, make)
    if resume is not None and resume.prompts not in ("", digest):
        raise Unavailable(
            "this answer has begun behind a prompt of other tokens: the node that began it has "
            "another chat template or tokenizer",
            code="another_prompt",
        )
    return digest
