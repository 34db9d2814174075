"""Reads questions about an input: each becomes a prompt, whose answer is one of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from decode_node.answer.decisions.decisions_format import DecisionsFormat
from decode_node.grammar.reasoning import ReasoningState
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.decisions.decisions import DecisionRequest
from decode_node.protocol.decisions.question_texts import Option
from decode_node.serving.decisions.label_tokens import label_tokens
from decode_node.serving.read_request import ReadRequest, RequestReader
from decode_node.serving.request_context import RequestContext
from decode_node.serving.served_model import ServedModel
from edge.http.errors import BadRequest
from edge.http.event_loop import long_work
from engine.contracts.sampling_params import MAX_LOGPROB_TOKEN_IDS


class DecisionReader:
    """Reads them for the model of `reader`."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader

    async def read(self, body: DecisionRequest, context: RequestContext) -> ReadRequest:
        """Returns what is asked of the engine: a prompt for each question. Raises `HttpError`."""
        known = self._reader.served
        served = known.of_request(body.model, context.model, context.adapter_digest).served
        body.check_count(served.limits.max_choices)
        options = body.all_options()
        token_ids = await self._labels(served, body, max(map(len, options)))
        _check_options(body, options, len(token_ids))
        labelled = [
            [replace(one, label=label) for one, label in zip(few, token_ids, strict=False)]
            for few in options
        ]
        messages = await long_work.run(context.is_long, body.messages)
        prompts = []
        for number, few in enumerate(labelled):
            await long_work.pause()
            make_chat = partial(body.to_chat, messages, number, few)
            chat = await long_work.run(context.is_long, make_chat)
            use = chat.tool_use()
            _, tokens = await served.prompts.of_chat(chat, use, is_long=context.is_long)
            prompts.append(tokens)
        ids = list(token_ids.values())
        make = partial(DecisionsFormat, questions=body.questions, label_ids=ids)
        return await self._reader.completion(body.to_completion(prompts, ids), context, make)

    async def _labels(
        self, served: ServedModel, body: DecisionRequest, count: int
    ) -> dict[str, int]:
        """Returns up to `count` labels with their tokens. Raises `BadRequest` for a model whose
        answers begin with something else."""
        chat = body.example()
        prompt = await served.prompts.render(chat, chat.tool_use(), is_long=False)
        _check_begins_answer(served, chat, prompt)
        return await label_tokens(served.tokenizer, prompt, min(count, MAX_LOGPROB_TOKEN_IDS))


def _check_begins_answer(served: ServedModel, chat: ChatCompletionRequest, prompt: str) -> None:
    """Raises `BadRequest` unless the answer itself may begin behind the prompt."""
    form = served.reading.parsers.reasoning_format
    state = served.reading.reasoning_state(chat, prompt)
    has_header = form is not None and bool(form.after) and state is ReasoningState.POSSIBLE
    if state is ReasoningState.OPEN or has_header:
        raise BadRequest(
            "this model does not begin its answers at once: its chat template cannot turn thinking "
            "off, or a header comes first; ask /v1/chat/completions for one of several texts "
            "(structured_outputs.choice)",
            param="model",
            code="unsupported_model",
        )


def _check_options(
    body: DecisionRequest, options: Sequence[Sequence[Option]], num_labels: int
) -> None:
    """Raises `BadRequest` for a question with more options than the model can name by a token."""
    for i, (question, few) in enumerate(zip(body.questions, options, strict=True)):
        if len(few) > num_labels:
            field = "choices" if question.type == "choice" else "levels"
            raise BadRequest(
                f"questions.{i} has {len(few)} options, and this model can tell {num_labels} apart "
                "by one token",
                param="model" if question.type == "predicate" else f"questions.{i}.{field}",
            )
