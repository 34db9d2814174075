"""Leads one request through the gate.

async with Ticket(gate, request) as ticket:     waits for its turn, or is refused
    ticket.check(placement)                     too late after all?
    ticket.first_byte()                         the slot is free for another
                                                (at the latest when the block ends)
    ticket.refused()                            a node would not answer: the tenant gets the tokens
                                                back, as when an `HttpError` ends the block
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from edge.http.errors import HttpError
from router.admission.admission_gate import AdmissionGate
from router.errors import Overloaded
from router.placement.policy import Placement
from router.request.info import RequestInfo


class Ticket:
    """Waits for its turn when it is entered, which raises `RateLimited` or `Overloaded`. Of what it
    may wait, `waited_s` seconds are over: a router that has much to do comes to it late."""

    def __init__(self, gate: AdmissionGate, request: RequestInfo, waited_s: float = 0.0) -> None:
        self._gate = gate
        self._request = request
        self._since = gate.clock() - waited_s
        self._has_slot = False
        self._refusal: Overloaded | None = None

    async def __aenter__(self) -> Self:
        gate = self._gate
        turn = asyncio.Event()
        waiting = gate.offer(
            self._request,
            lambda: self._admit(turn),
            lambda error: self._refuse(turn, error),
            self._waited_s(),
        )
        if waiting is None:
            return self
        left_s = self.time_left_s()
        try:
            async with asyncio.timeout(None if left_s == float("inf") else max(0.0, left_s)):
                await turn.wait()
        except TimeoutError:
            if not self._has_slot and self._refusal is None:
                self._refusal = gate.too_late(waiting)
        except BaseException:
            gate.withdraw(waiting)
            self.first_byte()
            raise
        if self._refusal is not None:
            self.refused()
            raise self._refusal
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.first_byte()
        if isinstance(exc, HttpError):
            self.refused()

    def check(self, placement: Placement) -> None:
        """Raises `Overloaded` when the first token would come after the deadline."""
        self._gate.check_placement(self._request, placement, self._waited_s())

    def time_left_s(self) -> float:
        """Returns the time until the deadline of the request; it may be over."""
        return self._gate.deadline_s(self._request) - self._waited_s()

    def first_byte(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._gate.free()

    def refused(self) -> None:
        self._gate.give_back(self._request)

    def _waited_s(self) -> float:
        return self._gate.clock() - self._since

    def _admit(self, turn: asyncio.Event) -> None:
        self._has_slot = True
        turn.set()

    def _refuse(self, turn: asyncio.Event, error: Overloaded) -> None:
        self._refusal = error
        turn.set()
