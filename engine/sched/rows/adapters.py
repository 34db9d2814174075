"""Which adapters the requests of a data-parallel group have in device memory.

    waiting ──its adapter is in host memory, and has a slot──▶ begins, and holds both
       │
       └── set aside until then: others pass

- A request that has left the waiting queue (it runs, or its KV is on its way) holds its adapter
  where it is. Slot and host memory of an adapter that nothing holds go to the next one that needs
  room.
- A request that must wait for its adapter lets others pass (`set_aside`), but not for ever: after
  `_MAX_PASSED` of them only requests without an adapter do, so that the slots become free.

All groups share one ledger of what is known and in host memory. Workers are notified of slots with
the requests that use them (`LoRASlot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.config import EngineConfig
from engine.contracts.outputs import LoRAStats
from engine.contracts.request import Request, RequestStatus
from engine.contracts.scheduler_output import LoRASlot
from engine.lora import LoRAConfig
from engine.sched.request_queue import RequestQueue
from engine.sched.rows.engine_adapters import EngineAdapters

_MAX_PASSED = 32
"""Requests with adapters that may overtake one that waits for room."""


class AdapterTable:
    """Gives the adapters of one group's requests slots; without `config.lora` it takes none.
    `requests` are all that the group's scheduler knows, `waiting` those that have not begun.

    Attributes:
        ledger: Of all adapters of the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        requests: Mapping[str, Request],
        waiting: RequestQueue,
    ) -> None:
        self._requests = requests
        self._waiting = waiting
        self._config = config.lora or LoRAConfig(max_loras=0, max_cpu_loras=0)
        self._slots: list[str] = [""] * self._config.max_loras
        self._aside: list[Request] = []
        self._num_passed: dict[str, int] = {}
        """How often requests that wait for room were overtaken, by request id."""
        self.ledger = EngineAdapters(self._config, config.parallel.num_ranks)
        share_ledger([self], self.ledger)

    # Requests use them ------------------------------------------------------------------------

    def refusal(self, request: Request) -> str:
        """Returns why the request's adapter cannot be used; empty when it can, or it has none."""
        adapter = request.spec.adapter
        if adapter is None:
            return ""
        if self._config.max_loras == 0:
            return f"adapter {adapter.name} is not served here: start the node with --enable-lora"
        return self.ledger.refusal(adapter.name, adapter.digest)

    def set_aside(self) -> bool:
        """Takes the first waiting request out of the queue, until `put_back`, if it must wait for
        its adapter. Returns whether it did."""
        request = self._waiting.peek()
        adapter = request.spec.adapter
        if adapter is None:
            return False
        name = request.request_id
        has_room = not self._aside_is_due and self._take(adapter.digest)
        if has_room:
            self._num_passed.pop(name, None)
            for other in self._aside:
                self._num_passed[other.request_id] += 1
            return False
        self._num_passed.setdefault(name, 0)
        self._aside.append(self._waiting.pop())
        return True

    def put_back(self) -> None:
        """Gives the queue back the requests that were set aside."""
        for request in self._aside:
            self._waiting.add(request)
        self._aside.clear()

    def request_ended(self, request_id: str) -> None:
        self._num_passed.pop(request_id, None)

    @property
    def _aside_is_due(self) -> bool:
        """Returns whether a request has been overtaken often enough."""
        return any(self._num_passed[one.request_id] >= _MAX_PASSED for one in self._aside)

    def _take(self, digest: str) -> bool:
        """Returns whether the adapter has a slot, now or from the request's first step on."""
        if not self.ledger.load(digest):
            return False
        if digest in self._slots:
            return True
        index = self._free_slot()
        if index is None:
            return False
        self._slots[index] = digest
        return True

    def _free_slot(self) -> int | None:
        if "" in self._slots:
            return self._slots.index("")
        free = set(self._slots) - self.held()
        return self._slots.index(min(free, key=self.ledger.last_use)) if free else None

    def held(self) -> set[str]:
        """Returns the adapters of requests that have left the waiting queue, and may enter a row at
        any time. Choices of a prompt that waits have nothing yet."""
        begun = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
        return {
            one.spec.adapter.digest
            for one in self._requests.values()
            if one.spec.adapter is not None
            and (one.status in begun or one.num_computed_tokens > 0)
            and one not in self._waiting
            and one.request_id not in self._num_passed
        }

    def slot_of(self, request: Request) -> LoRASlot | None:
        """Returns where the adapter is of a request that enters a row."""
        adapter = request.spec.adapter
        if adapter is None:
            return None
        return LoRASlot(self._slots.index(adapter.digest), adapter.digest)

    def requests_of(self, digest: str) -> list[str]:
        """Returns the ids of all requests that want an adapter."""
        return [
            name
            for name, one in self._requests.items()
            if one.spec.adapter is not None and one.spec.adapter.digest == digest
        ]

    def empty_slot(self, digest: str) -> None:
        """Frees the slot of an adapter that is forgotten."""
        self._slots = ["" if one == digest else one for one in self._slots]

    def take_slots(self, other: AdapterTable) -> None:
        """Goes on with the slots as `other` left them, of the same workers; no request uses
        either."""
        self._slots = other._slots

    def stats(self) -> LoRAStats | None:
        """Returns the adapters with requests; None: no adapter is served."""
        if self._config.max_loras == 0:
            return None
        requests = self._requests.values()
        return LoRAStats(
            running=_digests(one for one in requests if one.status is RequestStatus.RUNNING),
            waiting=_digests(one for one in requests if one.status is not RequestStatus.RUNNING),
            loaded=self.ledger.loaded(),
        )


def share_ledger(tables: Sequence[AdapterTable], ledger: EngineAdapters) -> None:
    """Lets the tables of all groups know the adapters of one ledger, wherever those are."""
    ledger.tables = tables
    for table in tables:
        table.ledger = ledger


def _digests(requests: Iterable[Request]) -> list[str]:
    found = {one.spec.adapter.digest for one in requests if one.spec.adapter is not None}
    return sorted(found)
