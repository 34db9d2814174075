"""One answer, from the outputs of its choices to the events or the body that carry it.

    engine ──▶ Delivery ──▶ Answer ──▶ ResponseFormat ──▶ events ─┐
                               └─────▶ JournalWriter  ──▶ lines ──┴──▶ what is sent at once

An output is with the client's connection (`edge.http.answers.event_writer`) when the engine's call
that brought it returns.

With a journal a plain body travels as the last event: the router unpacks it. An answer that goes
on where another node left off first replays what that one gave, which sets all state here and
sends nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET, UnsetType

from decode_node.answer.choice import (
    Choice,
    ChoiceResult,
    metrics_of,
    requests_of,
    times_of,
    usage_of,
)
from decode_node.answer.event import event
from decode_node.answer.format import ResponseFormat
from decode_node.answer.journal import JournalWriter, group_line
from decode_node.answer.running.aborts import AbortableRuns, OpenAnswers
from decode_node.answer.running.delivery import Delivery, Take
from decode_node.errors import Unavailable
from decode_node.metrics import DecodeMetrics
from decode_node.observe.timeline import Timeline
from edge.http.event_loop import long_work
from engine.contracts.errors import EngineDeadError
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import RequestOutput

Write = Callable[[bytes], None]
"""Takes whole events to be sent at once: mostly `EventWriter.write`."""

JOURNAL_INTERVAL_S = 0.25
"""Seconds between entries for a client that waits for all: tokens that are not sent yet cost a node
that goes on a moment, and nothing has seen them."""
_WAITING_INTERVAL_S = 5.0
"""Seconds between entries for a stream whose events wait for more: a router takes an answer of
which nothing new comes for one that is stuck."""
_MANY_LOGPROBS = 256
"""Positions of log probabilities that are written in the event loop; more, in a thread."""
_MANY_TOKENS = 2048
"""Tokens of whole answers that are parsed in the event loop; more, in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Says what an answer tells besides its choices.

    Attributes:
        usage_sent: Another node has sent the usage already.
    """

    include_usage: bool = False
    usage_sent: bool = False
    wants_timeline: bool = False
    wants_metrics: bool = False


class Answer:
    """Has the choices of one HTTP request computed, and carries their answer.

    Args:
        journal: None: nothing keeps one.
    """

    def __init__(
        self,
        runs: AbortableRuns,
        open_answers: OpenAnswers,
        choices: Sequence[Choice],
        form: ResponseFormat,
        metrics: DecodeMetrics,
        journal: JournalWriter | None,
        options: AnswerOptions,
    ) -> None:
        self._runs = runs
        self._open = open_answers
        self._choices = choices
        self._form = form
        self._metrics = metrics
        self._journal = journal
        self._options = options
        self._tells_usage = options.include_usage and not options.usage_sent
        self._begun: set[int] = set()
        """Choices that the journal has entries of."""
        self._num_running = len(choices)
        self._write: Write = _nothing
        self._written_at = time.monotonic()
        self._later: deque[tuple[Choice, RequestOutput]] = deque()
        self._slow: asyncio.Task[None] | None = None
        """Writes what comes `_later`."""

    async def stream(self, write: Write) -> None:
        """Writes the events for a client that wants a stream, each within the call that brings its
        output. The timeline rides on the last chunk: the usage chunk, where there is one. Raises
        `HttpError`."""
        self._write = write
        try:
            await self._run(self._take)
            if self._slow is not None:
                await self._slow
            if self._tells_usage:
                usage = self._form.usage_events(usage_of(self._choices), self._timeline(True))
                if self._journal is not None:
                    self._journal.usage_sent()
                write(self._marked(usage, None, True))
        finally:
            if self._slow is not None:
                self._slow.cancel()
            self._write = _nothing  # The writer knows the response, which knows this.
            self._metrics.observe(self._choices)

    async def body(self) -> bytes:
        """Returns the body for a client that wants it whole. Raises `HttpError`."""
        try:
            results = [ChoiceResult(choice) for choice in self._choices]
            await self._run(lambda choice, output: results[choice.index].add(output))
            return await self._body(results)
        finally:
            self._metrics.observe(self._choices)

    async def stream_body(self, write: Write) -> None:
        """Writes entries of the journal from time to time, then the body. Raises `HttpError`.

        A choice with log probabilities of its prompt is not noted: they are much, and cannot be
        had without computing the prompt, so another node begins it again, with the same seed.
        """
        results = [ChoiceResult(choice) for choice in self._choices]
        written_at = 0.0

        def take(choice: Choice, output: RequestOutput) -> None:
            nonlocal written_at
            results[choice.index].add(output)
            if output.is_replay:
                return
            if choice.request.spec.sampling.prompt_logprobs is None:
                self._note(choice, output)
            if (now := time.monotonic()) - written_at >= JOURNAL_INTERVAL_S:
                written_at = now
                if lines := self._lines(choice):
                    write(lines + b"\n")

        try:
            await self._run(take)
            body = await self._body(results)
            write(self._end_line() + event(body))
        finally:
            self._metrics.observe(self._choices)

    async def _run(self, take: Take) -> None:
        """Gives the outputs of all choices to `take` as they come, and returns behind the last. A
        task that is cancelled aborts what is left.

        Raises `CannotFollow`, `GenerationFailed` or `Unavailable` when one choice cannot be
        completed, and what `take` raises.
        """
        requests = list(requests_of(self._choices))
        try:
            with self._open.giving(self._runs):
                if len(requests) == 1:
                    await self._run_one(requests[0], take)
                else:
                    await self._run_all(requests, take)
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this node has died: {error}") from error

    async def _run_one(self, choices: list[Choice], take: Take) -> None:
        """Runs choices that are one request."""
        first = choices[0]
        if first.replay is not None:
            first.record.on_output(first.replay)
            take(first, first.replay)
            return
        request = GenerationRequest.of_choices(
            f"{first.request.request_id}+{len(choices) - 1}", [one.request for one in choices]
        )
        await self._runs.run(request, choices, Delivery(request, choices, take))

    async def _run_all(self, requests: list[list[Choice]], take: Take) -> None:
        """Runs a task for each request; the first failure ends all."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for choices in requests:
                tasks.append(asyncio.create_task(self._run_one(choices, take)))
                # Each begins with work on its whole prompt: other requests come in between.
                await asyncio.sleep(0)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, choice: Choice, output: RequestOutput) -> None:
        """Writes an output. Log probabilities of a long prompt take seconds to write: that happens
        beside the event loop, and what comes meanwhile waits."""
        if self._slow is None and not output.prompt_logprobs:
            is_last = self._progress(choice, output)
            if output.is_replay:
                self._form.resume(choice, output)
            else:
                events = self._form.events(choice, output, self._timeline(is_last))
                self._send(events, choice, output, is_last)
            return
        self._later.append((choice, output))
        if self._slow is None:
            self._slow = asyncio.create_task(self._take_later())
        elif self._slow.done():
            self._slow.result()  # It failed, or it would not be here.

    async def _take_later(self) -> None:
        while self._later:
            choice, output = self._later.popleft()
            is_last = self._progress(choice, output)
            work = partial(self._form.events, choice, output, self._timeline(is_last))
            events = await long_work.run(bool(output.prompt_logprobs), work)
            self._send(events, choice, output, is_last)
        self._slow = None

    def _progress(self, choice: Choice, output: RequestOutput) -> bool:
        """Counts an output. Returns whether its last event is the answer's."""
        choice.num_given_tokens += len(output.token_ids)
        self._num_running -= output.finished
        return self._num_running == 0 and not self._tells_usage

    def _send(
        self, events: list[bytes], choice: Choice, output: RequestOutput, is_last: bool
    ) -> None:
        self._note(choice, output)
        if events:
            self._write(self._marked(events, choice, is_last))
        elif self._form.repeats and self._journal is not None:
            self._write_waiting(choice)

    def _write_waiting(self, choice: Choice) -> None:
        """Writes entries of tokens that no event has yet, if it is time."""
        now = time.monotonic()
        if now - self._written_at >= _WAITING_INTERVAL_S and (lines := self._lines(choice)):
            self._written_at = now
            self._write(lines + b"\n")

    def _note(self, choice: Choice, output: RequestOutput) -> None:
        if self._journal is None:
            return
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            if choice.num_cached is None:
                self._journal.cached(choice.index, choice.record.prefill.cached_tokens)
        self._journal.output(choice.index, output, self._form.num_events)

    def _end_line(self) -> bytes:
        """Returns the line that tells a router where the time went."""
        return b"" if self._journal is None else times_of(self._choices).line()

    def _marked(self, events: list[bytes], choice: Choice | None, is_last: bool) -> bytes:
        """Returns events to be sent at once, and in front of them what a router has to know."""
        lines = self._lines(choice) + (self._end_line() if is_last else b"")
        if self._journal is not None and len(events) > 1:
            lines = group_line(len(events)) + lines
        return lines + b"".join(events)

    def _lines(self, choice: Choice | None = None) -> bytes:
        if self._journal is None:
            return b""
        return self._journal.take(None if choice is None else choice.index)

    async def _body(self, results: list[ChoiceResult]) -> bytes:
        usage, timeline = usage_of(self._choices), self._timeline(True)
        num_logprobs = sum(len(r.prompt_logprobs) + len(r.logprobs) for r in results)
        num_tokens = sum(len(result.token_ids) for result in results)
        if num_logprobs <= _MANY_LOGPROBS and num_tokens <= _MANY_TOKENS:
            return self._form.body(results, usage, timeline)
        return await long_work.run(True, partial(self._form.body, results, usage, timeline))

    def _timeline(self, is_last: bool) -> Timeline | UnsetType:
        """Returns the timeline of the first choice, with the answer's last event."""
        if not is_last:
            return UNSET
        if self._options.wants_metrics:
            self._form.metrics = metrics_of(self._choices)
        return self._choices[0].record.timeline() if self._options.wants_timeline else UNSET


def _nothing(data: bytes) -> None:
    """Stands for the client's connection before an answer begins, and behind its end."""
