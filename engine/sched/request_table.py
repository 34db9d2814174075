"""Holds the requests of one scheduler, and counts those that run on what no other request uses."""

from __future__ import annotations

from engine.contracts.request import Request
from engine.contracts.request_spec import IDLE_PRIORITY


class RequestTable(dict[str, Request]):
    """Is the table, by id. Entries are set and deleted one by one."""

    num_idle = 0

    def __setitem__(self, name: str, request: Request) -> None:
        super().__setitem__(name, request)
        self.num_idle += request.spec.priority == IDLE_PRIORITY

    def __delitem__(self, name: str) -> None:
        self.num_idle -= self[name].spec.priority == IDLE_PRIORITY
        super().__delitem__(name)
