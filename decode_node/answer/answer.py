"""One answer, from the outputs of its choices to the events or the body that carry it.

    outputs ──▶ ResponseFormat ──▶ events ─┐
       └──────▶ JournalWriter  ──▶ lines ──┴──▶ what is sent at once

With a journal a plain body travels as the last event: the router unpacks it. An answer that goes
on where another node left off first replays what that one gave, which sets all state here and
sends nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from msgspec import UNSET, UnsetType

from decode_node.answer.event import event
from decode_node.answer.format import ResponseFormat
from decode_node.answer.generation import Choice, ChoiceResult, Generation
from decode_node.answer.journal import JournalWriter, group_line
from decode_node.metrics import DecodeMetrics
from decode_node.observe.timeline import Timeline
from edge.http import long_work
from engine.frontend.output_processor import RequestOutput

Write = Callable[[bytes], None]
"""Takes whole events to be sent at once."""

JOURNAL_INTERVAL_S = 0.25
"""Seconds between entries for a client that waits for all: tokens that are not sent yet cost a node
that goes on a moment, and nothing has seen them."""
_MANY_LOGPROBS = 256
"""Positions of log probabilities that are written in the event loop; more, in a thread."""
_MANY_TOKENS = 2048
"""Tokens of whole answers that are parsed in the event loop; more, in a thread."""


class Answer:
    """Carries one answer. `journal` is None when nothing keeps one; `is_usage_told` says that
    another node has told usage already."""

    def __init__(
        self,
        generation: Generation,
        form: ResponseFormat,
        metrics: DecodeMetrics,
        journal: JournalWriter | None = None,
        *,
        include_usage: bool = False,
        is_usage_told: bool = False,
        wants_timeline: bool = False,
        wants_metrics: bool = False,
    ) -> None:
        self._generation = generation
        self._form = form
        self._metrics = metrics
        self._journal = journal
        self._tells_usage = include_usage and not is_usage_told
        self._wants_timeline = wants_timeline
        self._wants_metrics = wants_metrics
        self._begun: set[int] = set()
        """Choices that the journal has entries of."""
        self._num_running = len(generation.choices)
        self._write: Write = lambda data: None
        self._later: deque[tuple[Choice, RequestOutput]] = deque()
        self._slow: asyncio.Task[None] | None = None
        """Writes what comes `_later`."""

    async def stream(self, write: Write) -> None:
        """Writes the events for a client that wants a stream, each within the call that brings its
        output. The timeline rides on the last chunk: the usage chunk, where there is one. Raises
        `HttpError`."""
        self._write = write
        try:
            await self._generation.run(self._take)
            if self._slow is not None:
                await self._slow
            if self._tells_usage:
                usage = self._form.usage_events(self._generation.usage(), self._timeline(True))
                if self._journal is not None:
                    self._journal.usage_told()
                write(self._marked(usage, None, True))
        finally:
            if self._slow is not None:
                self._slow.cancel()
            self._metrics.observe(self._generation.choices)

    async def body(self) -> bytes:
        """Returns the body for a client that wants it whole. Raises `HttpError`."""
        try:
            return await self._body(await self._generation.collect())
        finally:
            self._metrics.observe(self._generation.choices)

    async def stream_body(self, write: Write) -> None:
        """Writes entries of the journal from time to time, then the body. Raises `HttpError`.

        A choice with log probabilities of its prompt is not noted: they are much, and cannot be
        had without computing the prompt, so another node begins it again, with the same seed.
        """
        results = [ChoiceResult(choice) for choice in self._generation.choices]
        told_at = 0.0

        def take(choice: Choice, output: RequestOutput) -> None:
            nonlocal told_at
            results[choice.index].add(output)
            if output.is_replay:
                return
            if choice.request.spec.sampling.prompt_logprobs is None:
                self._note(choice, output)
            if (now := time.monotonic()) - told_at >= JOURNAL_INTERVAL_S:
                told_at = now
                if lines := self._lines(choice):
                    write(lines + b"\n")

        try:
            await self._generation.run(take)
            body = await self._body(results)
            write(self._end_line() + event(body))
        finally:
            self._metrics.observe(self._generation.choices)

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
        return b"" if self._journal is None else self._generation.answer_times().line()

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
        usage, timeline = self._generation.usage(), self._timeline(True)
        num_logprobs = sum(len(r.prompt_logprobs) + len(r.logprobs) for r in results)
        num_tokens = sum(len(result.token_ids) for result in results)
        if num_logprobs <= _MANY_LOGPROBS and num_tokens <= _MANY_TOKENS:
            return self._form.body(results, usage, timeline)
        return await long_work.run(True, partial(self._form.body, results, usage, timeline))

    def _timeline(self, is_last: bool) -> Timeline | UnsetType:
        if is_last and self._wants_metrics:
            self._form.metrics = self._generation.metrics()
        return self._generation.timeline() if is_last and self._wants_timeline else UNSET
