"""The work of one HTTP request: one or several choices.

prompts × n  ──▶  choices, numbered prompt by prompt  ──▶  outputs, as they come

Choices of one prompt are one request, whose prompt is computed once. Only a choice that goes on
where another node left off is a request of its own: it has tokens of its own behind the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.disagg.proxy import DisaggProxy
from decode_node.errors import CannotFollow, GenerationFailed, Unavailable
from decode_node.observe.timeline import RequestMetrics, RequestRecord, Timeline
from decode_node.protocol.usage import PromptTokensDetails, Usage
from edge.http.answer_times import AnswerTimes
from engine.contracts.errors import EngineDeadError
from engine.contracts.outputs import PromptLogprobs, TokenLogprobs
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import RequestOutput
from engine.frontend.pieces import Piece


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
    num_cached: int | None = None
    resumed_logprobs: list[TokenLogprobs] | None = None
    replay: RequestOutput | None = None
    num_given_tokens: int = 0
    """Tokens of the outputs that the generation has given so far."""

    @property
    def cached_tokens(self) -> int:
        return self.record.prefill.cached_tokens if self.num_cached is None else self.num_cached

    @property
    def is_begun(self) -> bool:
        """Returns whether the client has tokens of it from another node."""
        return self.replay is not None or self.request.spec.num_resumed_tokens > 0

    def told(self, output: RequestOutput) -> RequestOutput:
        """Returns what the client gets for an output. Raises `CannotFollow`,
        `GenerationFailed` or `Unavailable` for an answer that does not come to its own end."""
        if output.finish_reason is not None:
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


Take = Callable[[Choice, RequestOutput], None]
"""Takes the outputs of an answer, in the order of each choice. It does not wait."""


def unpacked(parts: list[PromptLogprobs] | None) -> list[TokenLogprobs]:
    return [logprobs for part in parts or () for logprobs in part.unpack()]


class Generation:
    """Runs all choices of one HTTP request. `prefill_nodes` None stands for the proxy's own."""

    def __init__(
        self,
        proxy: DisaggProxy,
        choices: list[Choice],
        prefill_nodes: Sequence[str] | None,
    ) -> None:
        self._proxy = proxy
        self.choices = choices
        self._prefill_nodes = prefill_nodes

    async def run(self, take: Take) -> None:
        """Gives the outputs of all choices to `take` as they come, and returns behind the last. A
        task that is cancelled aborts what is left.

        Raises `CannotFollow`, `GenerationFailed` or `Unavailable` when one choice cannot be
        completed, and what `take` raises.
        """
        forks = list(_forks(self.choices))
        try:
            if len(forks) == 1:
                await self._run(forks[0], take)
            else:
                await self._run_all(forks, take)
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this node has died: {error}") from error

    async def collect(self) -> list[ChoiceResult]:
        """Returns all choices, complete."""
        results = [ChoiceResult(choice) for choice in self.choices]
        await self.run(lambda choice, output: results[choice.index].add(output))
        return results

    def usage(self) -> Usage:
        firsts = [choice for choice in self.choices if choice.is_first_of_prompt]
        prompt = sum(choice.record.num_prompt_tokens for choice in firsts)
        completion = sum(
            choice.record.num_output_tokens for choice in self.choices if not choice.is_prompt_only
        )
        cached = sum(choice.cached_tokens for choice in firsts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def timeline(self) -> Timeline:
        """Returns the timeline of the first choice."""
        return self.choices[0].record.timeline()

    def metrics(self) -> RequestMetrics | UnsetType:
        """Returns the times of a single answer that this node alone gave; of several, or of a part,
        they would say nothing."""
        first = self.choices[0]
        is_whole = len(self.choices) == 1 and not first.is_begun
        return first.record.metrics() if is_whole else UNSET

    def answer_times(self) -> AnswerTimes:
        """Returns what a router learns at the end: the times of the first choice, with the tokens
        of all."""
        times = self.choices[0].record.answer_times()
        return msgspec.structs.replace(times, tokens=self.usage().completion_tokens)

    async def _run(self, fork: list[Choice], take: Take) -> None:
        """Runs choices that are one request."""
        first = fork[0]
        if first.replay is not None:
            first.record.on_output(first.replay)
            take(first, first.replay)
            return
        for choice in fork:
            choice.record.prefill = first.record.prefill

        request = GenerationRequest.of_choices(
            f"{first.request.request_id}+{len(fork) - 1}", [choice.request for choice in fork]
        )
        await self._proxy.run(request, fork, take, self._prefill_nodes)

    async def _run_all(self, forks: list[list[Choice]], take: Take) -> None:
        """Runs a task for each request; the first failure ends all."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for fork in forks:
                tasks.append(asyncio.create_task(self._run(fork, take)))
                # Each begins with work on its whole prompt: other requests come in between.
                await asyncio.sleep(0)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _check_end(output: RequestOutput) -> None:
    """Raises what the client gets for an answer that did not come to its own end."""
    if output.finish_reason == "abort":
        why = output.error or "this node is stopping; try another"
        raise Unavailable(why, code="draining")
    if output.error:
        raise CannotFollow(output.error)
    if output.finish_reason == "error":
        raise GenerationFailed("the request was ended by the engine; try it again")


def _forks(choices: Sequence[Choice]) -> Iterator[list[Choice]]:
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


def _without_output(output: RequestOutput) -> RequestOutput:
    """Returns the end of a request that generated its only token for none."""
    return replace(
        output, token_ids=[], text="", logprobs=None, finish_reason="length", stop_reason=None
    )
