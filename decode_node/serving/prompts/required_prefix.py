"""Begins a chat's prompt with tokens that the client has, up to the end of the last answer.
Trainers ask for it: the text of an answer may have other tokens than those that were drawn.

    text      U1 A1. U2     as the template writes it
    another   U1 x.  U2     with another answer in that place
    rest            . U2    the end that both have, of which the tokens are made
    prompt    given  U2     the answer's end is the given one where there is one, else the rest's
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.chat_messages import ChatMessage
from edge.http.errors import BadRequest
from engine.contracts.errors import InvalidRequest
from engine.frontend.input_processor import check_token_ids

PARAM = "required_prefix_token_ids"
_PIECE = 1 << 16
"""Characters, a power of two: pieces of texts of many MB are copied once, not once for each guess
of a search."""


@dataclass(frozen=True, slots=True)
class RequiredPrefix:
    """Holds the tokens. `at`: the message of the answer with which they end."""

    token_ids: list[int]
    at: int

    @classmethod
    def of(cls, body: ChatCompletionRequest, vocab_size: int) -> Self | None:
        """Returns what a chat's prompt must begin with; None if it is the template's alone. Raises
        `BadRequest`."""
        given = body.required_prefix_token_ids
        if not given:
            return None
        try:
            check_token_ids(given, vocab_size)
        except InvalidRequest as error:
            raise BadRequest(f"{PARAM}: {error.message}", param=PARAM) from None
        for name in ("continue_final_message", "truncate_prompt_tokens"):
            if getattr(body, name):
                raise BadRequest(f"{PARAM} and {name} exclude each other", param=PARAM)
        if body.image_params:
            message = f"{PARAM} does not go with images; they stand in it as placeholders"
            raise BadRequest(message, param=PARAM)
        answers = [i for i, one in enumerate(body.messages) if one.role == "assistant"]
        if not answers:
            raise BadRequest(f"{PARAM} ends with an answer, and messages has none", param=PARAM)
        answer = body.messages[answers[-1]]
        if (answer.model_extra or {}).get("function_call") and not answer.tool_calls:
            message = f"{PARAM} ends with an answer that has a function_call: write its call as "
            raise BadRequest(f"{message}tool_calls", param=PARAM)
        return cls(given, answers[-1])

    def another(self, body: ChatCompletionRequest) -> ChatCompletionRequest:
        """Returns the chat with another answer in the place of the last one."""
        messages = list(body.messages)
        messages[self.at] = _another(messages[self.at])
        return body.model_copy(update={"messages": messages})

    def may_end_otherwise(self, rest: list[int], end_ids: Collection[int]) -> bool:
        """Says whether the template may close answers with another token than models do, as
        gpt-oss's does."""
        return self.token_ids[-1] in end_ids and bool(rest) and rest[0] not in end_ids

    def until_answer(self, body: ChatCompletionRequest) -> ChatCompletionRequest:
        """Returns the chat that ends with that answer."""
        update = {"messages": body.messages[: self.at + 1], "add_generation_prompt": False}
        return body.model_copy(update=update)

    def before(
        self, rest: list[int], end_ids: Collection[int], *, has_calls: bool, closes: bool
    ) -> list[int]:
        """Returns the prompt's tokens. Raises `BadRequest`.

        Args:
            rest: Tokens of the text from the end of the answer on; where it has calls, from a place
                inside of the last one on.
            end_ids: Tokens that end answers.
            closes: The first token of the rest is the template's own end of an answer, if not one
                of those.
        """
        if has_calls:
            end = next((i for i, one in enumerate(rest) if one in end_ids), None)
            if end is None:
                message = f"{PARAM}: this model's template writes no token that ends a call's turn"
                raise BadRequest(message, param=PARAM)
            rest = rest[end:]
        if self.token_ids[-1] in end_ids and rest and (rest[0] in end_ids or closes):
            rest = rest[1:]
        return [*self.token_ids, *rest]


def kept_tokens(messages: Sequence[ChatMessage], vocab_size: int) -> list[int]:
    """Returns the tokens that a trainer has kept with the last answer that has any, and those of
    its prompt; none where they are no tokens of this model."""
    for message in reversed(messages):
        prompt, answer = message.prompt_token_ids, message.generation_token_ids
        if prompt and answer:
            with suppress(TypeError, ValueError, OverflowError, InvalidRequest):
                found = [int(token) for token in (*prompt, *answer)]
                check_token_ids(found, vocab_size)
                return found
            break
    return []


def common_end(text: str, other: str) -> str:
    """Returns the longest text with which both end."""
    same, most, step = 0, min(len(text), len(other)), _PIECE
    while step:
        end, other_end = len(text) - same, len(other) - same
        if same + step <= most and text[end - step : end] == other[other_end - step : other_end]:
            same += step
        else:
            step //= 2
    return text[len(text) - same :]


def _another(message: ChatMessage) -> ChatMessage:
    """Returns a message that differs in the last thing that templates write of it."""
    if message.tool_calls:
        *others, last = message.tool_calls
        name = "a" * (len(str(last.function.arguments)) + 1)
        function = last.function.model_copy(update={"arguments": {name: 1}})
        calls = [*others, last.model_copy(update={"function": function})]
        return message.model_copy(update={"tool_calls": calls})
    said = "b" if message.text.rstrip().endswith("a") else "a"
    return message.model_copy(update={"content": said})
