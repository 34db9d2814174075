"""Ends answers before their own end, where an operator or a trainer names them.

What was generated stays, and the answer ends as complete, with finish_reason `abort`:

    waits for room or for a prefill node    the wait ends, and no token comes
    the engine has it                       the engine ends it
    is read, or its prompt is being made    it ends then
    it comes with `ABORTED` of a router     nothing is computed
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

from decode_node.answer.choice import Choice
from decode_node.answer.running.delivery import Delivery
from decode_node.disagg.proxy import DisaggProxy
from engine.frontend.input_processor import GenerationRequest


class EarlyAborts:
    """Is one request's, from its head to its answer, which is not known by name before."""

    def __init__(self) -> None:
        self._calls: list[frozenset[str] | None] = []

    def note(self, names: frozenset[str] | None) -> None:
        """Notes a call that ends the answers of these names, or all."""
        self._calls.append(names)

    def are_of(self, names: Collection[str]) -> bool:
        """Returns whether a call has ended an answer of these names."""
        return any(call is None or not call.isdisjoint(names) for call in self._calls)


class OpenAnswers:
    """Knows the answers that are being given, and those that will be."""

    def __init__(self) -> None:
        self._open: set[AbortableRuns] = set()
        self._expected: WeakSet[EarlyAborts] = WeakSet()

    def expect(self) -> EarlyAborts:
        """Returns what learns of the end of an answer before it is given, as long as it is kept."""
        early = EarlyAborts()
        self._expected.add(early)
        return early

    @contextmanager
    def giving(self, runs: AbortableRuns) -> Iterator[None]:
        """Is entered while an answer is given."""
        self._open.add(runs)
        self._expected.discard(runs.early)
        if runs.early.are_of(runs.names):
            runs.abort()
        try:
            yield
        finally:
            self._open.discard(runs)

    def abort(self, names: Collection[str] | None) -> int:
        """Ends the answers of these names, or all; returns how many they are, without those that
        were aborted before."""
        called = None if names is None else frozenset(names)
        for early in list(self._expected):
            early.note(called)
        met = [runs for runs in self._open if called is None or not called.isdisjoint(runs.names)]
        found = [runs for runs in met if not runs.is_aborted]
        for runs in found:
            runs.abort()
        return len(found)


class AbortableRuns:
    """Runs the requests of one answer, until they end or it is aborted.

    Args:
        names: By which clients know the answer.
        early: What may have ended it before.
        is_aborted: It was before it came here. Of what another node has begun, that is all.
    """

    def __init__(
        self, proxy: DisaggProxy, names: Collection[str], early: EarlyAborts, *, is_aborted: bool
    ) -> None:
        self._proxy = proxy
        self.names = names
        self.early = early
        self._is_aborted = is_aborted
        self._running: dict[str, tuple[Sequence[Choice], asyncio.Timeout]] = {}

    @property
    def is_aborted(self) -> bool:
        return self._is_aborted

    async def run(
        self,
        request: GenerationRequest,
        choices: Sequence[Choice],
        delivery: Delivery,
    ) -> None:
        """Returns when all choices have ended. Raises as `DisaggProxy.run`."""
        if not self._is_aborted:
            deadline = asyncio.timeout(None)
            try:
                async with deadline:
                    self._running[request.request_id] = choices, deadline
                    try:
                        await self._proxy.run(request, delivery, choices[0].prefill_nodes)
                    finally:
                        del self._running[request.request_id]
                return
            except TimeoutError:
                if not deadline.expired():
                    raise
        _mark(choices)
        delivery.end_unbegun()

    def abort(self) -> None:
        """Ends what has not ended. Idempotent."""
        self._is_aborted = True
        now = asyncio.get_running_loop().time()
        for request_id, (choices, deadline) in list(self._running.items()):
            _mark(choices)
            if not self._proxy.abort(request_id):
                deadline.reschedule(now)


def _mark(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.is_aborted = True
