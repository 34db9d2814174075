"""Makes the grammar of each request for one model: what the fields say, composed and checked."""

from __future__ import annotations

from collections.abc import Mapping

from decode_node.grammar.answer_grammar import THINKING_BUDGET, answer_grammar
from decode_node.grammar.checks.grammar_checker import GrammarChecker
from decode_node.grammar.grammar_text import Expression, GrammarText
from decode_node.grammar.reasoning import ReasoningFormat, ReasoningState
from decode_node.grammar.structured_output import express, find_constraint
from decode_node.protocol.bodies.structured_output import StructuredFields
from engine.config import ModelConfig


class AnswerGrammars:
    """Knows what all grammars of a model have in common.

    Args:
        special: Ids of the tokenizer's added tokens, by their texts.
        reasoning: How the model thinks; None for a model that does not.
    """

    def __init__(
        self,
        model: ModelConfig,
        special: Mapping[str, int],
        reasoning: ReasoningFormat | None,
        checker: GrammarChecker,
    ) -> None:
        self._end_ids = model.eos_token_ids
        self._special = special
        self._reasoning = reasoning
        self._checker = checker

    def text(self) -> GrammarText:
        """Returns an empty grammar, for a body of the caller's own."""
        return GrammarText(self._special)

    async def of_fields(self, fields: StructuredFields, state: ReasoningState) -> str:
        """Returns the grammar that the fields of a request ask for; "" for a free answer. `state`
        is that of its prompt. Raises `BadRequest`, `Overloaded`, `Unavailable`."""
        constraint = find_constraint(fields)
        text = self.text()
        if constraint is None:
            return await self.of_body(
                text, None, THINKING_BUDGET, state, fields.thinking_token_budget
            )
        body = express(constraint, text)
        return await self.of_body(text, body, constraint.param, state, fields.thinking_token_budget)

    async def of_body(
        self,
        text: GrammarText,
        body: Expression | None,
        param: str,
        state: ReasoningState,
        budget: int | None = None,
    ) -> str:
        """Returns the grammar of answers with this body, whose rules are in `text`. `param` is the
        field that a refusal names. Raises as `of_fields`."""
        written = answer_grammar(
            text,
            body,
            end_ids=self._end_ids,
            reasoning=self._reasoning,
            state=state,
            budget=None if budget == -1 else budget,
        )
        return await self._checker.check(written, param) if written else ""
