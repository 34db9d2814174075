"""Keeps the tickets with which steps wait for the layers of loads: each has a place among the marks
that workers look at.

    free place ── issue ──▶ the load's ──▶ it is right ────────────────────────────▶ free
                                      └──▶ it failed: a step may wait ── release ──▶ free
"""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.tier import LoadTicket


class LoadTickets:
    def __init__(self, num_places: int, release: Callable[[LoadTicket], None] | None) -> None:
        """Calls `release` to let steps go on that wait with a ticket."""
        self._places = list(range(num_places))
        self._release = release
        self._failed: dict[int, LoadTicket] = {}
        """Tickets of loads that failed, which a step may still wait with."""

    @property
    def has_free(self) -> bool:
        return bool(self._places)

    def issue(self, number: int) -> LoadTicket:
        """Returns a new ticket. Its number is not the load's: a load behind a fetch begins after
        jobs that are younger."""
        return LoadTicket(self._places.pop(), number)

    def ended(self, load: int, ticket: LoadTicket, *, is_right: bool) -> None:
        if is_right:
            self._places.append(ticket.place)
        else:
            self._failed[load] = ticket

    def release(self, load: int) -> None:
        """Lets a step go on that may wait for a load which has failed."""
        ticket = self._failed.pop(load, None)
        if ticket is not None:
            self._places.append(ticket.place)
            if self._release is not None:
                self._release(ticket)
