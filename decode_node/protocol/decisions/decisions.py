"""Reads and writes the bodies of /v1/decisions: questions about an input, answered by
probabilities.

Each question amounts to a chat of its own: the input, and behind it the question with a label, a
letter or two, for each of its options. What counts is how likely the labels are as the first token
of the answer, so the options of a question are at most as many as there are labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from decode_node.observe.timeline import Timeline
from decode_node.protocol.bodies.body import Int, Name, StrictBody
from decode_node.protocol.bodies.ignored_fields import CallerFields, SessionFields
from decode_node.protocol.chat.other_chat import ChatOfAnother
from decode_node.protocol.decisions.question_texts import (
    Option,
    as_texts,
    asked,
    json_as_text,
    question_text,
)
from decode_node.protocol.other_names import named_fields
from decode_node.protocol.responses.responses_input import chat_messages
from decode_node.protocol.tokens.other_completion import CompletionOfAnother
from edge.http.errors import BadRequest

_NO_IMAGES = "images are not supported in decisions; send them to /v1/chat/completions"


class DecisionChoice(StrictBody):
    """One of the options of a `choice`."""

    value: str | bool
    """The name of it in the answer. The text `"true"` and true are two options."""
    description: str | None = None
    """Tells the model more about it."""


class DecisionLevel(StrictBody):
    """One of the steps of a `score`."""

    label: str
    """The name of it, for the model and in the answer."""
    description: str | None = None
    """Tells the model more about it."""


class DecisionQuestion(StrictBody):
    """A question about the input."""

    type: Literal["predicate", "choice", "score"]
    """Whether a statement is true, which of `choices` fits, or how far the input is on the scale
    of `levels`."""
    instructions: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    """The statement or the question: a text, or parts with text or JSON."""
    name: Name | None = None
    """The answer has the same."""
    choices: Annotated[list[DecisionChoice], Field(fail_fast=True)] | None = None
    """The options of a `choice`, of which no two are the same."""
    levels: Annotated[list[DecisionLevel], Field(fail_fast=True)] | None = None
    """The steps of a `score`, from the lowest on, which counts 0."""

    @property
    def num_options(self) -> int:
        return 2 if self.type == "predicate" else len(self._given)

    @property
    def _given(self) -> Sequence[DecisionChoice | DecisionLevel]:
        return (self.choices if self.type == "choice" else self.levels) or ()

    def options(self, place: str) -> list[Option]:
        """Returns what the model may choose from. Raises `BadRequest`."""
        if self.type == "predicate":
            return [Option("true"), Option("false")]
        place = f"{place}.{'choices' if self.type == 'choice' else 'levels'}"
        if self.num_options < 2:
            raise BadRequest(f"{place} must have 2 items at least", param=place)
        values = [(type(one.value), one.value) for one in self.choices or ()]
        if self.type == "choice" and len(set(values)) < len(values):
            raise BadRequest(f"{place} has one value twice", param=place)
        return [
            Option(
                one.label if isinstance(one, DecisionLevel) else json_as_text(one.value),
                one.description or "",
            )
            for one in self._given
        ]


class DecisionRequest(SessionFields, CallerFields):
    """The body of POST /v1/decisions."""

    model: Name | None = None
    """A name that this server gives its model; any of them, or none."""
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    """The text that the questions are about, as the user's, or items as those of /v1/responses:
    messages, calls of functions and custom tools, and their outputs. Parts of messages may be JSON
    (`input_json`); images are refused."""
    questions: Annotated[list[DecisionQuestion], Field(fail_fast=True, min_length=1)]
    """The questions, at most 64 (`--max-choices`). Each is answered by itself; the input is
    computed once where prefixes are cached: by prefill nodes, or with `--enable-prefix-caching`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, beside those that turn thinking off; an
    extension."""
    priority: Int | None = None
    """Smaller runs first, where nodes schedule by priority; an extension."""
    cache_salt: Name | None = None
    """Requests share cached prefixes only with requests of the same salt; vLLM's extension."""

    def named_fields(self) -> AbstractContextManager[None]:
        """Names fields of the chats and the completion in errors as this API does."""
        return named_fields({"messages": "input", "prompt": "input"})

    def check_count(self, most: int) -> None:
        """Raises `BadRequest` for more questions than one request may have."""
        if len(self.questions) > most:
            raise BadRequest(
                f"questions has {len(self.questions)}, and one request has {most} answers at most "
                "(--max-choices)",
                param="questions",
            )

    def all_options(self) -> list[list[Option]]:
        """Returns the options of each question. Raises `BadRequest`."""
        return [one.options(f"questions.{i}") for i, one in enumerate(self.questions)]

    def example(self) -> ChatOfAnother:
        """Returns a chat whose prompt ends as those of all questions do."""
        return self._chat([{"role": "user", "content": "?"}])

    def messages(self) -> list[dict[str, Any]]:
        """Returns the input as the messages of a chat. Raises `BadRequest`."""
        return chat_messages(None, as_texts(self.input, "input"), {})

    def to_chat(
        self, messages: list[dict[str, Any]], number: int, options: Sequence[Option]
    ) -> ChatOfAnother:
        """Returns the chat of a question, whose options have labels; `messages` are those of the
        input. Raises `BadRequest`."""
        question, place = self.questions[number], f"questions.{number}"
        text = question_text(question.type, question.instructions, options, place)
        chat = self._chat(asked(messages, text))
        if chat.image_params:
            place = chat.image_params[0]
            raise BadRequest(f"{place}: {_NO_IMAGES}", param=place)
        return chat

    def _chat(self, messages: list[dict[str, Any]]) -> ChatOfAnother:
        return ChatOfAnother.of({
            "messages": messages,
            "model": self.model,
            "reasoning_effort": "none",
            "chat_template_kwargs": self.chat_template_kwargs,
            "max_completion_tokens": 1,
        })  # fmt: skip

    def to_completion(
        self, prompts: list[list[int]], label_ids: Sequence[int]
    ) -> CompletionOfAnother:
        """Returns what is asked of the engine: one token for each prompt, and how likely each label
        was in its place."""
        return CompletionOfAnother.with_images(
            (),
            prompt=prompts,
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            logprob_token_ids=list(label_ids),
        )


class PredicateAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="predicate"):
    """Says how likely a statement is."""

    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct):
    """Says how likely an option is."""

    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="choice"):
    """Says which option is the most likely one. `confidence`: how likely the model would have
    answered with its label, and with nothing else."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(msgspec.Struct):
    """Says how likely a level is; `value` counts them from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="score"):
    """Says which level is to be expected: `score` is the mean."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


class RefusedAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    """Stands for an answer that was ended by /abort_request."""

    name: str | None


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusedAnswer


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct, kw_only=True):
    """Counts the tokens of all prompts together: the input is in each, and cached but once."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Decision(msgspec.Struct, kw_only=True):
    """The answers to all questions, in their order."""

    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage
    timeline: Timeline | UnsetType = UNSET
