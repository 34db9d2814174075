"""The choices of one HTTP request, from what is asked of the engine to what is known at the end.

prompts × n  ──▶  choices, numbered prompt by prompt

Choices of one prompt are one request, whose prompt is computed once (`requests_of`). Only a choice
that goes on where another node left off is a request of its own: it has tokens of its own behind
the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.errors import CannotFollow, GenerationFailed, Unavailable
from decode_node.observe.timeline import RequestMetrics, RequestRecord
from decode_node.protocol.usage import PromptTokensDetails, Usage
from edge.http.answers.answer_times import AnswerTimes
from engine.contracts.outputs import PromptLogprobs, TokenLogprobs
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import RequestOutput
from engine.frontend.text.pieces import Piece


@dataclass(slots=True)
class Choice:
    """One answer. `is_first_of_prompt` marks the choice that counts the prompt in `usage`.

    One that another node began has what that one found in its cache (`num_cached`), and either
    goes on (`request` knows from where) or is complete: then `replay` is all of it.
    """

    index: int
    request: GenerationRequest
    record: RequestRecord
    is_first_of_prompt: bool
    prompt_text: str = ""
    """The prompt's text, when the answer begins with it (`echo`)."""
    echoes_logprobs: bool = False
    is_prompt_only: bool = False
    """The answer is only about the prompt: what is generated is not part of it."""
    is_cut: bool = False
    """The context has no room for all the tokens that were asked for."""
    num_cached: int | None = None
    resumed_logprobs: list[TokenLogprobs] | None = None
    replay: RequestOutput | None = None
    when_aborted: Callable[[], Iterator[RequestOutput]] | None = None
    """Yields the outputs of one that goes on, if it is aborted before the engine has it."""
    prefill_nodes: Sequence[str] | None = None
    """Which a router names for its prompt; None: the proxy's own."""
    num_given_tokens: int = 0
    """Tokens of the outputs that the generation has given so far."""
    is_aborted: bool = False
    """An operator or trainer wants its end, so that an abort is one."""

    @property
    def cached_tokens(self) -> int:
        return self.record.prefill.cached_tokens if self.num_cached is None else self.num_cached

    @property
    def is_begun(self) -> bool:
        """Returns whether the client has tokens of it from another node."""
        return self.replay is not None or self.request.spec.num_resumed_tokens > 0

    def checked(self, output: RequestOutput) -> RequestOutput:
        """Returns what the client gets for an output. Raises `CannotFollow`,
        `GenerationFailed` or `Unavailable` for an answer that does not come to its own end."""
        if output.finish_reason is not None:
            if output.finish_reason == "abort" and self.is_aborted:
                return output
            _check_end(output)
        if output.is_replay:
            output.logprobs = self.resumed_logprobs
        return _without_output(output) if self.is_prompt_only else output

    def usage(self) -> Usage:
        """Returns the usage of this choice alone, up to the output given last."""
        prompt, completion = self.record.num_prompt_tokens, self.num_given_tokens
        return Usage(
            prompt, completion, prompt + completion, PromptTokensDetails(self.cached_tokens)
        )


@dataclass(slots=True)
class ChoiceResult:
    """Collects one choice until it is complete."""

    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    """The text as its parser reads it; empty where the request names no marker tokens."""
    num_hidden: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The prompt's, from its second token on."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.pieces += output.pieces or ()
        self.num_hidden = output.num_hidden
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += unpacked(output.prompt_logprobs)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


def unpacked(parts: list[PromptLogprobs] | None) -> list[TokenLogprobs]:
    return [logprobs for part in parts or () for logprobs in part.unpack()]


def requests_of(choices: Sequence[Choice]) -> Iterator[list[Choice]]:
    """Yields choices that are one request: those of a prompt which nothing has begun. Others are
    alone."""
    fork: list[Choice] = []
    for choice in choices:
        if choice.is_first_of_prompt and fork:
            yield fork
            fork = []
        if choice.is_begun:
            yield [choice]
        else:
            fork.append(choice)
    if fork:
        yield fork


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Returns the usage of one HTTP request, up to now."""
    firsts = [choice for choice in choices if choice.is_first_of_prompt]
    prompt = sum(choice.record.num_prompt_tokens for choice in firsts)
    completion = sum(
        choice.record.num_output_tokens for choice in choices if not choice.is_prompt_only
    )
    cached = sum(choice.cached_tokens for choice in firsts)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def metrics_of(choices: Sequence[Choice]) -> RequestMetrics | UnsetType:
    """Returns the times of a single answer that this node alone gave; of several, or of a part,
    they would say nothing."""
    first = choices[0]
    is_whole = len(choices) == 1 and not first.is_begun
    return first.record.metrics() if is_whole else UNSET


def times_of(choices: Sequence[Choice]) -> AnswerTimes:
    """Returns what a router learns at the end: the times of the first choice, with the tokens of
    all."""
    times = choices[0].record.answer_times()
    return msgspec.structs.replace(times, tokens=usage_of(choices).completion_tokens)


def _check_end(output: RequestOutput) -> None:
    """Raises what the client gets for an answer that did not come to its own end."""
    if output.finish_reason == "abort":
        why = output.error or "this node is stopping; try another"
        raise Unavailable(why, code="draining")
    if output.error:
        raise CannotFollow(output.error)
    if output.finish_reason == "error":
        raise GenerationFailed("the request was ended by the engine; try it again")


def _without_output(output: RequestOutput) -> RequestOutput:
    """Returns the end of a request that generated its only token for none."""
    return replace(
        output, token_ids=[], text="", logprobs=None, finish_reason="length", stop_reason=None
    )
