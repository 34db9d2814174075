"""Makes the grammar of a chat: its calls, its content, and how the two go together.

tool_choice required or named      calls, whatever response_format says
auto, with response_format         calls, or content that follows it
auto, with strict tools            text, in which what begins as a call is one
anything else                      what the fields ask for, or nothing

Under auto, tools that are not strict are called with any arguments where a schema cannot be kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from decode_node.grammar.answer_grammar import THINKING_BUDGET
from decode_node.grammar.answer_grammars import AnswerGrammars
from decode_node.grammar.grammar_text import Expression, GrammarText, either
from decode_node.grammar.reasoning import ReasoningState
from decode_node.grammar.structured_output import express, find_constraint
from decode_node.parsers.output_parsers import OutputParsers
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.tools import ToolUse
from decode_node.protocol.other_names import named_fields
from edge.http.errors import BadRequest


class ChatGrammar:
    """Makes grammars for one model. `end_ids` are its end-of-sequence ids."""

    def __init__(
        self, grammars: AnswerGrammars, parsers: OutputParsers, end_ids: Collection[int]
    ) -> None:
        self._grammars = grammars
        self._parsers = parsers
        self._end_ids = end_ids

    async def of_chat(
        self, body: ChatCompletionRequest, use: ToolUse, state: ReasoningState
    ) -> str:
        """Returns the grammar of an answer; "" for a free one. Raises `BadRequest`, `Overloaded`,
        `Unavailable`."""
        try:
            return await self._of_chat(body, use, state)
        except BadRequest as error:
            lax = use.without_lax_schemas()
            if use.mode != "auto" or error.param != "tools" or lax == use:
                raise
            # It is there for the number of calls, or for other tools that are strict.
            return await self._of_chat(body, lax, state)

    async def _of_chat(
        self, body: ChatCompletionRequest, use: ToolUse, state: ReasoningState
    ) -> str:
        text = self._grammars.text()
        constraint = find_constraint(body)
        if constraint is None:
            expression, param = self._calls(text, use), "tools"
        else:
            content = self._parsers.content_grammar(text, express(constraint, text))
            expression, param = self._with_calls(text, use, content), constraint.param
        field, budget = self._budget(body)
        if expression is None:
            param = field
        with named_fields({THINKING_BUDGET: field}):
            return await self._grammars.of_body(text, expression, param, state, budget)

    def _budget(self, body: ChatCompletionRequest) -> tuple[str, int | None]:
        """Returns the most tokens of thinking, and the field that says it."""
        if body.thinking_token_budget is None and self._parsers.reasoning_format is not None:
            return body.other_budget or (THINKING_BUDGET, None)
        return THINKING_BUDGET, body.thinking_token_budget

    def _with_calls(self, text: GrammarText, use: ToolUse, content: Expression) -> Expression:
        if not use.may_call:
            return content
        must = use if use.must_call else replace(use, mode="required")
        calls = self._calls(text, must)
        assert calls is not None, "a call that must be made has a grammar"
        return calls if use.must_call else either(content, calls)

    def _calls(self, text: GrammarText, use: ToolUse) -> Expression | None:
        return self._parsers.call_grammar(text, use, self._end_ids)
