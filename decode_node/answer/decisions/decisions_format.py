"""Forms the bodies of /v1/decisions, from how likely each label was as the answer's token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from decode_node.answer.choice import Choice, ChoiceResult
from decode_node.answer.format import FormatOptions, ResponseFormat
from decode_node.answer.logprobs import TokenTexts
from decode_node.observe.timeline import Timeline
from decode_node.protocol.decisions.decisions import (
    ChoiceAnswer,
    ChoiceProbability,
    Decision,
    DecisionAnswer,
    DecisionQuestion,
    DecisionUsage,
    InputDetails,
    OutputDetails,
    PredicateAnswer,
    RefusedAnswer,
    ScoreAnswer,
    ScoreProbability,
)
from decode_node.protocol.usage import Usage
from engine.frontend.output_processor import RequestOutput


class DecisionsFormat(ResponseFormat):
    """Forms them. There are no streams of this API. `label_ids`: the tokens of the labels, in the
    order of the options."""

    id_prefix = "decision"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: TokenTexts,
        options: FormatOptions,
        *,
        questions: Sequence[DecisionQuestion],
        label_ids: Sequence[int],
    ) -> None:
        super().__init__(request_id, model, tokenizer, options)
        self._questions = questions
        self._label_ids = label_ids

    def events(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> list[bytes]:
        return []

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        """Notes nothing: no event was sent."""

    def usage_events(self, usage: Usage, timeline: Timeline | UnsetType) -> list[bytes]:
        return []

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        pairs = zip(self._questions, results, strict=True)
        return self._encoder.encode(
            Decision(
                model=self.model,
                answers=[self._answer(question, result) for question, result in pairs],
                usage=DecisionUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
                    output_tokens=usage.completion_tokens,
                    output_tokens_details=OutputDetails(),
                    total_tokens=usage.total_tokens,
                ),
                timeline=timeline,
            )
        )

    def _answer(self, question: DecisionQuestion, result: ChoiceResult) -> DecisionAnswer:
        if not result.logprobs:
            return RefusedAnswer(name=question.name)
        place = result.logprobs[0]
        known = dict(zip(place.token_ids, place.logprobs, strict=True))
        count = (
            2 if question.type == "predicate" else len(question.choices or question.levels or ())
        )
        logprobs = [known[one] for one in self._label_ids[:count]]
        shares = label_shares(logprobs)
        if question.type == "predicate":
            return PredicateAnswer(name=question.name, probability=shares[0])
        best = max(range(count), key=shares.__getitem__)
        confidence = math.exp(logprobs[best])
        if question.type == "choice":
            values = [one.value for one in question.choices or ()]
            return ChoiceAnswer(
                name=question.name,
                choice=values[best],
                confidence=confidence,
                probabilities=list(map(ChoiceProbability, values, shares)),
            )
        names = [one.label for one in question.levels or ()]
        return ScoreAnswer(
            name=question.name,
            score=sum(i * share for i, share in enumerate(shares)),
            confidence=confidence,
            probabilities=list(map(ScoreProbability, range(count), names, shares)),
        )


def label_shares(logprobs: Sequence[float]) -> list[float]:
    """Returns the probabilities of labels among themselves, which add up to 1."""
    highest = max(logprobs)
    if not math.isfinite(highest):
        return [1 / len(logprobs)] * len(logprobs)
    shares = [math.exp(one - highest) for one in logprobs]
    total = sum(shares)
    return [one / total for one in shares]
