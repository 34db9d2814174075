"""Forms outputs of a generation into what one API says of them: a whole body, or events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.answer.choice import Choice, ChoiceResult
from decode_node.answer.event import DONE, event
from decode_node.answer.journal import Resume
from decode_node.answer.logprobs import TokenNames, TokenTexts, prompt_logprobs
from decode_node.observe.timeline import RequestMetrics, Timeline
from decode_node.protocol.usage import PromptLogprobList, Usage
from edge.http.errors import HttpError
from engine.frontend.output_processor import RequestOutput

CUT = ("length", "abort")
"""Finish reasons of answers that were not done. Not every API has the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOptions:
    """Options of a request: what it wants besides its text."""

    created: int
    """The Unix seconds at which the answer was created."""
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_prompt_logprobs: bool
    tokens_as_ids: bool = False
    """Log probabilities name tokens by their ids."""
    has_named_logprobs: bool = False
    """Log probabilities are reported for tokens that the client named."""
    fingerprint: str | None = None
    """Names what computes the answer (`ServedModel.fingerprint`)."""


class ResponseFormat(ABC):
    """Forms the answer to one HTTP request, and keeps what later events depend on.

    `events` gives none when an output has nothing to show. The last ones of a choice have its
    finish reason.
    """

    id_prefix: str
    done = DONE
    """Ends a stream that is complete; empty in an API where the last event says so."""

    numbers_events = False
    """Each event of a stream has a number."""

    repeats = False
    """Each event of a stream has all of its answer so far, usage included: no other tells usage,
    and tokens may be noted before the next event has them."""

    def __init__(
        self, request_id: str, model: str, tokenizer: TokenTexts, options: FormatOptions
    ) -> None:
        self.id = f"{self.id_prefix}-{request_id}"
        self.model = model
        self.created = options.created
        self._tokenizer = TokenNames(tokenizer, by_id=options.tokens_as_ids)
        self.fingerprint = options.fingerprint
        self.num_events = 0
        """The events that were sent, where they are numbered."""
        self._options = options
        self.metrics: RequestMetrics | UnsetType = UNSET
        """The answer's times, which are known when its last event is formed."""
        self._encoder = msgspec.json.Encoder()

    def take_over(self, resume: Resume) -> None:
        """Goes on with an answer that another node began. Comes before any output."""
        self.num_events = resume.num_events

    @property
    def identity(self) -> str:
        """Returns what no other answer is named: ids may come twice from clients, the second of
        creation tells their answers apart."""
        return f"{self.id}/{self.created}"

    @abstractmethod
    def events(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> list[bytes]:
        """Returns the events of one output. A client gets all of them, or none."""

    @abstractmethod
    def resume(self, choice: Choice, output: RequestOutput) -> None:
        """Notes that another node has sent events for all of `output`."""

    @abstractmethod
    def usage_events(self, usage: Usage, timeline: Timeline | UnsetType) -> list[bytes]:
        """Returns what ends a stream that tells usage."""

    @abstractmethod
    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes: ...

    def error_event(self, error: HttpError) -> bytes:
        """Returns the event that ends a stream which breaks off."""
        return event(error.body())

    def error_body(self, error: HttpError) -> bytes:
        """Returns the body of an answer that cannot be given."""
        return error.body()

    def _chunk_usage(self, choice: Choice) -> Usage | UnsetType | None:
        """Returns what a chunk says of usage: null where the usage chunk tells it all."""
        if self._options.continuous_usage:
            return choice.usage()
        return None if self._options.include_usage else UNSET

    @property
    def _has_text_events(self) -> bool:
        """Says whether events in the midst of an answer hold nothing new besides their text."""
        return not (self._options.continuous_usage or self._options.return_token_ids)

    def _token_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self._options.return_token_ids else UNSET

    def _prompt_ids(self, choice: Choice) -> list[int] | UnsetType:
        return self._token_ids(choice.request.spec.own_prompt_token_ids)

    def _prompt_logprobs(self, result: ChoiceResult) -> PromptLogprobList | UnsetType:
        if not self._options.return_prompt_logprobs:
            return UNSET
        return prompt_logprobs(self._tokenizer, result.prompt_logprobs)

    def _has_news(self, output: RequestOutput) -> bool:
        return bool(
            output.text
            or output.logprobs
            or output.finished
            or (self._options.return_token_ids and output.token_ids)
        )


def stop_reason(output: RequestOutput) -> int | str | UnsetType | None:
    """Returns what a chunk says: nothing before the end."""
    return output.stop_reason if output.finished else UNSET
