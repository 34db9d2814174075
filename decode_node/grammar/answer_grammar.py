"""Composes the one grammar of an answer: thinking, where the model may think, and then the body.

    start: think? body        think: <[begin]> <[^end]>* <[end]> after

A budget of thinking tokens is a bound of that repetition: behind it only the end is allowed. With
nothing else to keep, the body is any text, in which further thinking has the same budget.
"""

from __future__ import annotations

from collections.abc import Collection

from decode_node.grammar.grammar_text import (
    Expression,
    GrammarText,
    any_token_but,
    either,
    optional,
    regex,
    repeat,
    sequence,
    token,
)
from decode_node.grammar.reasoning import ReasoningFormat, ReasoningState
from edge.http.errors import BadRequest

_LINES = regex(r"\n{0,2}")
"""Line breaks that models like to leave behind their thinking."""
MAX_THINKING_BUDGET = 1 << 20
THINKING_BUDGET = "thinking_token_budget"
"""The field that says the budget, unless the API has another one."""


def answer_grammar(
    text: GrammarText,
    body: Expression | None,
    *,
    end_ids: Collection[int],
    reasoning: ReasoningFormat | None = None,
    state: ReasoningState = ReasoningState.CLOSED,
    budget: int | None = None,
) -> str:
    """Returns the grammar of a whole answer; "" if there is nothing to keep.

    Args:
        text: Has the rules that `body` refers to.
        body: What follows the thinking; None for any text, special tokens included.
        end_ids: The model's end-of-sequence ids, none of which may come amid thinking.
        reasoning: How the model thinks; None for a model that does not.
        state: What the prompt's end says about it.
        budget: Tokens of each span of thinking, its markers not counted; None for any number.

    Raises:
        BadRequest: There is a budget, and the end of this model's thinking is not one token.
    """
    if budget is not None:
        _check_budget(budget, reasoning)
    if reasoning is None or (body is not None and state is ReasoningState.CLOSED):
        return "" if body is None else text.write(body)
    if body is None:
        return "" if budget is None else _free_answer(text, end_ids, reasoning, state, budget)
    after = text.marked(reasoning.after) if reasoning.after else _LINES
    rest = sequence(_span(text, end_ids, reasoning, budget), after)
    if state is ReasoningState.OPEN:
        return text.write(sequence(rest, body))
    begin = reasoning.begin
    opening = text.marked(begin.text) if begin.token_id is None else token(begin.token_id)
    think = text.rule("think", sequence(opening, rest))
    return text.write(sequence(optional(think), body))


def _free_answer(
    text: GrammarText,
    end_ids: Collection[int],
    reasoning: ReasoningFormat,
    state: ReasoningState,
    budget: int,
) -> str:
    """Returns the grammar of any text whose thinking has a budget."""
    begin = reasoning.begin.token_id
    assert begin is not None
    span = _span(text, end_ids, reasoning, budget)
    think = text.rule("think", sequence(token(begin), span))
    other = any_token_but({begin, *end_ids})
    rest = repeat(either(other, think))
    return text.write(sequence(span, rest) if state is ReasoningState.OPEN else rest)


def _span(
    text: GrammarText,
    end_ids: Collection[int],
    reasoning: ReasoningFormat,
    budget: int | None,
) -> Expression:
    """Returns the rule of thinking behind its begin, up to and with its end."""
    end = reasoning.end.token_id
    if end is None:
        return text.until("thinking", reasoning.end.text)
    inner = repeat(any_token_but({end, *end_ids, *reasoning.others}), 0, budget)
    return text.rule("thinking", sequence(inner, token(end)))


def _check_budget(budget: int, reasoning: ReasoningFormat | None) -> None:
    name = THINKING_BUDGET
    if not 0 <= budget <= MAX_THINKING_BUDGET:
        raise BadRequest(
            f"{name} must be between 0 and {MAX_THINKING_BUDGET}, not {budget}", param=name
        )
    if reasoning is None:
        raise BadRequest(
            f"{name} is for models whose thinking this server can tell from the answer; "
            "see --reasoning-parser",
            param=name,
        )
    if reasoning.begin.token_id is None or reasoning.end.token_id is None:
        raise BadRequest(
            f"{name} is not supported for this model: the markers of its thinking are not one "
            "token each",
            param=name,
        )
