"""Tells one watcher of a node's adapters: in its first report all, then what has changed.

all        to those who keep none, at first, and where changes since are no longer known
none       nothing has changed
changes    some have: all of them again to a router that does not take changes alone
"""

from __future__ import annotations

from engine.contracts.request_spec import AdapterRef
from engine.frontend.calls.served_adapters import ServedAdapters
from tandem_pb import node_pb2


class AdapterReports:
    """Adds adapters to the reports of one stream, each of which has to be sent."""

    def __init__(self, served: ServedAdapters, request: node_pb2.WatchRequest) -> None:
        self._served = served
        self._request = request
        self._num_told = -1

    def add_to(self, load: node_pb2.NodeLoad) -> None:
        """Adds what the watcher does not know yet."""
        changes = self._served.since(self._num_told)
        if changes is None or (changes and not self._request.takes_adapter_changes):
            add_adapters(load, self._served)
        else:
            load.adapter_changes.extend(_message(name, ref) for name, ref in changes)
        if self._request.keeps_adapters:
            self._num_told = self._served.num_changes


def add_adapters(load: node_pb2.NodeLoad, served: ServedAdapters) -> None:
    """Adds all of them to a report that says that they have not changed."""
    load.has_same_adapters = False
    load.adapters.extend(_message(name, ref) for name, ref in served.items())


def _message(name: str, ref: AdapterRef | None) -> node_pb2.Adapter:
    return node_pb2.Adapter(name=name, digest="" if ref is None else ref.digest)
