"""Holds the requests of one scheduler, and counts those that run on what no other request uses."""

from __future__ import annotations

from engine.contracts.request import Request


class RequestTable(dict[str, Request]):
    """Is the table, by id. Entries are set and deleted one by one."""

    num_idle = 0

    def __setitem__(self, name: str, request: Request) -> None:
        super().__setitem__(name, request)
        self.num_idle += request.is_idle_class

    def __delitem__(self, name: str) -> None:
        self.num_idle -= self[name].is_idle_class
        super().__delitem__(name)
