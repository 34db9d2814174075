"""One grammar from the first token on: thinking, its budget, and the body behind it."""

from __future__ import annotations

import pytest

from decode_node.grammar.answer_grammar import answer_grammar
from decode_node.grammar.grammar_text import GrammarText, json_schema, literal
from decode_node.grammar.reasoning import (
    Marker,
    ReasoningFormat,
    ReasoningState,
    reasoning_state,
)
from edge.http.errors import BadRequest
from tests.decode_node.grammar.matching import (
    CALL,
    END_CALL,
    END_IDS,
    END_THINK,
    THINK,
    accepts,
    allowed_after,
    random_answer,
)

TOKENS = ReasoningFormat(Marker("<think>", THINK), Marker("</think>", END_THINK), after="\n\n")
TEXTS = ReasoningFormat(Marker("[T]"), Marker("[/T]"))
OPEN, CLOSED, POSSIBLE = ReasoningState.OPEN, ReasoningState.CLOSED, ReasoningState.POSSIBLE


def grammar(
    state: ReasoningState,
    body: str | None = literal("yes"),
    form: ReasoningFormat = TOKENS,
    budget: int | None = None,
) -> str:
    return answer_grammar(
        GrammarText(), body, end_ids=END_IDS, reasoning=form, state=state, budget=budget
    )


@pytest.mark.parametrize(
    ("prompt", "continued", "state"),
    [
        ("<user>hi<assistant>", "", POSSIBLE),
        ("<user>hi<assistant><think>\n", "", OPEN),
        ("<user>hi<assistant><think>\n\n</think>\n\n", "", CLOSED),
        ("<user>a<assistant><think>x</think>b<user>c<assistant>", "", POSSIBLE),
        ("<user>what does <think> mean?<assistant>", "", POSSIBLE),
        ("<user>a<assistant>It is", "It is", CLOSED),
        ("<user>a<assistant><think>Let me", "<think>Let me", OPEN),
        ("<user>a<assistant><think>Let me</think>It is", "<think>Let me</think>It is", CLOSED),
    ],
)
def test_the_end_of_the_prompt_decides(prompt: str, continued: str, state: ReasoningState) -> None:
    assert reasoning_state(prompt, TOKENS, continued=continued) is state


def test_a_prompt_that_opened_thinking_is_gone_on_with() -> None:
    text = grammar(OPEN)
    assert accepts(text, "hmm </think> as text", CALL, END_THINK, "\n\nyes")
    assert accepts(text, END_THINK, "\n\nyes")
    assert not accepts(text, "yes")
    assert not accepts(text, THINK, "hmm", END_THINK, "yes")
    assert not set(END_IDS) & set(allowed_after(text, "hmm"))


def test_a_prompt_that_closed_thinking_has_an_answer_at_once() -> None:
    text = grammar(CLOSED)
    assert accepts(text, "yes")
    assert THINK not in allowed_after(text)


def test_otherwise_the_model_may_think_or_not() -> None:
    text = grammar(POSSIBLE)
    assert accepts(text, "yes")
    assert accepts(text, THINK, "so\n", END_THINK, "\n\nyes")
    assert not accepts(text, "hmm", END_THINK, "\n\nyes")
    assert set(allowed_after(text)) & {THINK} and len(allowed_after(text)) < 5


def test_markers_may_be_text() -> None:
    assert accepts(grammar(OPEN, form=TEXTS), "so [/ [T] is\n[/T]yes")
    assert accepts(grammar(POSSIBLE, form=TEXTS), "[T]so[/T]yes")
    assert accepts(grammar(POSSIBLE, form=TEXTS), "yes")
    assert not accepts(grammar(OPEN, form=TEXTS), "so[/T]no[/T]yes")


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("state", [OPEN, POSSIBLE])
def test_a_budget_forces_the_end_of_thinking_and_then_the_body(
    state: ReasoningState, budget: int
) -> None:
    text = grammar(state, json_schema({"enum": ["a", 1]}), budget=budget)
    begun = [THINK] if state is POSSIBLE else []
    thought = [CALL] * budget
    assert allowed_after(text, *begun, *thought) == [END_THINK]
    if budget:
        assert len(allowed_after(text, *begun, *thought[1:])) > 300
    assert accepts(text, *begun, *thought, END_THINK, '\n\n"a"')


@pytest.mark.parametrize("state", [OPEN, POSSIBLE, CLOSED])
def test_a_budget_alone_leaves_the_answer_free(state: ReasoningState) -> None:
    text = grammar(state, None, budget=3)
    begun = [THINK] if state is not OPEN else []
    free = ["any text\n", CALL, '{"a": 1}', END_CALL, "</think>"]
    assert accepts(text, *begun, CALL, CALL, CALL, END_THINK, *free)
    assert allowed_after(text, *begun, CALL, CALL, CALL) == [END_THINK]
    assert set(END_IDS) <= set(allowed_after(text, *begun, END_THINK))
    assert accepts(text, *free) is (state is not OPEN)


def test_a_budget_counts_each_span_of_thinking() -> None:
    text = grammar(POSSIBLE, None, budget=2)
    assert accepts(text, THINK, CALL, END_THINK, "so", THINK, CALL, CALL, END_THINK)
    assert allowed_after(text, THINK, END_THINK, "so", THINK, CALL, CALL) == [END_THINK]


@pytest.mark.parametrize("seed", range(3))
def test_random_thinking_ends_within_its_budget(seed: int) -> None:
    ids, is_complete = random_answer(grammar(OPEN, budget=40), seed, 200)
    assert is_complete and ids.index(END_THINK) <= 40


def test_nothing_to_keep_is_no_grammar() -> None:
    for state in ReasoningState:
        assert grammar(state, None) == ""
    assert answer_grammar(GrammarText(), None, end_ids=END_IDS) == ""


def test_a_model_that_does_not_think_answers_at_once() -> None:
    text = answer_grammar(GrammarText(), literal("yes"), end_ids=END_IDS, state=OPEN)
    assert accepts(text, "yes")


@pytest.mark.parametrize(
    ("budget", "form"), [(-1, TOKENS), (1 << 40, TOKENS), (5, TEXTS), (5, None)]
)
def test_a_budget_that_cannot_be_kept_is_refused(budget: int, form: ReasoningFormat | None) -> None:
    with pytest.raises(BadRequest) as caught:
        answer_grammar(
            GrammarText(), None, end_ids=END_IDS, reasoning=form, state=OPEN, budget=budget
        )
    assert caught.value.param == "thinking_token_budget"
