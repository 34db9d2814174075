"""Which adapters an engine knows, and where they are. Decides for all workers.

    KNOWN ──a request wants it──▶ LOADING ──all ranks have it──▶ LOADED   in host memory
      ▲                              │                             │
      │                              └─ could not be read:         │ a request that wants it leaves
      │                                 its requests end           ▼ the waiting queue
      └──────────── least recently used, and nobody runs ◀─── in a slot too, of device memory

- A request that has left the waiting queue (it runs, or its KV is on its way) holds its adapter
  where it is. Slot and host memory of an adapter that nobody holds go to the next one that needs
  room.
- A request that must wait for its adapter lets others pass (`set_aside`), but not for ever: after
  `_MAX_PASSED` of them only requests without an adapter do, so that the slots become free.
- An adapter that is removed takes no more requests and is forgotten when the last one has ended.

Each data-parallel group has a table with slots of its own; the tables of all groups share what is
known and in host memory, which is decided for all workers alike (`share_host_memory`).

Workers hear of slots with the requests that use them (`LoRASlot`), of host memory by `commands`;
both reach them in order with the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.outputs import LoRAStats
from engine.contracts.request import Request, RequestStatus
from engine.contracts.scheduler_output import LoRASlot
from engine.lora import LoRAConfig
from engine.sched.request_queue import RequestQueue

_MAX_PASSED = 32
"""Requests with adapters that may overtake one that waits for room."""


class _State(Enum):
    KNOWN = "known"
    LOADING = "loading"
    LOADED = "loaded"


@dataclass(slots=True)
class _Adapter:
    digest: str
    path: str
    state: _State = _State.KNOWN
    used_at: int = 0
    """Counts uses of any adapter."""
    is_leaving: bool = False


class AdapterTable:
    """Knows all adapters of one engine by digest; `config` None: it takes none. `requests` are all
    that the scheduler knows, `waiting` those of them that have not begun.

    Attributes:
        commands: To be sent to the workers, in order, before the next step.
    """

    def __init__(
        self,
        config: LoRAConfig | None,
        requests: Mapping[str, Request],
        waiting: RequestQueue,
    ) -> None:
        self._requests = requests
        self._waiting = waiting
        self._config = config or LoRAConfig(max_loras=0, max_cpu_loras=0)
        self._known: dict[str, _Adapter] = {}
        self._slots: list[str] = [""] * self._config.max_loras
        self._uses = count(1)
        self._tables: Sequence[AdapterTable] = (self,)
        """Those of all groups."""
        self._aside: list[Request] = []
        self._num_passed: dict[str, int] = {}
        """How often requests that wait for room were overtaken, by request id."""
        self.commands: list[LoadAdapter | DropAdapter] = []
        for index, module in enumerate(self._config.modules):
            known = self.add(module.digest, module.path)
            if index < self._config.max_cpu_loras:
                known.state = _State.LOADED

    def take_over(self, other: AdapterTable) -> None:
        """Knows from now on what `other` does, of the same workers; no request uses either."""
        for mine, theirs in zip(self._tables, other._tables, strict=True):
            mine._known, mine._slots, mine._uses = theirs._known, theirs._slots, theirs._uses
            mine.commands = theirs.commands

    # Adapters come and go ---------------------------------------------------------------------

    def add(self, digest: str, path: str) -> _Adapter:
        """Makes an adapter known. One that is known stays where it is."""
        known = self._known.setdefault(digest, _Adapter(digest, path))
        known.path, known.is_leaving = path, False
        return known

    def load(self, digest: str) -> bool:
        """Sees to it that an adapter is in host memory, or will be. Returns whether it is."""
        known = self._known[digest]
        if known.state is _State.KNOWN and self._make_room():
            known.state = _State.LOADING
            self.commands.append(LoadAdapter(digest, known.path))
        return known.state is _State.LOADED

    def loaded(self, digest: str, error: str) -> None:
        """Hears that all ranks have an adapter, or `error`: why they do not. Then it is forgotten,
        and whoever waits for it must end."""
        known = self._known[digest]
        if error:
            known.state = _State.KNOWN
            self._forget(known)
        else:
            known.state = _State.LOADED

    def is_loading(self, digest: str) -> bool:
        """Returns whether ranks have yet to answer."""
        return self._known[digest].state is _State.LOADING

    def requests_of(self, digest: str) -> list[str]:
        """Returns the ids of all requests that want an adapter."""
        return [
            name
            for table in self._tables
            for name, one in table._requests.items()
            if one.spec.adapter is not None and one.spec.adapter.digest == digest
        ]

    def remove(self, digest: str) -> None:
        """Takes an adapter out of use; `forget_leaving` ends it."""
        if digest in self._known:
            self._known[digest].is_leaving = True

    def forget_leaving(self) -> list[str]:
        """Forgets removed adapters that no request wants any more; returns their digests."""
        leaving = [one for one in self._known.values() if one.is_leaving]
        if not leaving:
            return []
        wanted = {name for table in self._tables for name in _digests(table._requests.values())}
        gone = [
            one for one in leaving if one.digest not in wanted and one.state is not _State.LOADING
        ]
        for one in gone:
            self._forget(one)
        return [one.digest for one in gone]

    def _forget(self, known: _Adapter) -> None:
        if known.state is _State.LOADED:
            self.commands.append(DropAdapter(known.digest))
        del self._known[known.digest]
        for table in self._tables:
            table._slots = ["" if one == known.digest else one for one in table._slots]

    # Requests use them ------------------------------------------------------------------------

    def refusal(self, request: Request) -> str:
        """Returns why the request's adapter cannot be used; empty when it can, or it has none."""
        adapter = request.spec.adapter
        if adapter is None:
            return ""
        if self._config.max_loras == 0:
            return f"adapter {adapter.name} is not served here: start the node with --enable-lora"
        known = self._known.get(adapter.digest)
        if known is None or known.is_leaving:
            return f"adapter {adapter.name} is not loaded here; load it with /v1/load_lora_adapter"
        return ""

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
        """Gives the queue back who was set aside."""
        for request in self._aside:
            self._waiting.add(request)
        self._aside.clear()

    def request_ended(self, request_id: str) -> None:
        self._num_passed.pop(request_id, None)

    @property
    def _aside_is_due(self) -> bool:
        """Returns whether somebody has been overtaken often enough."""
        return any(self._num_passed[one.request_id] >= _MAX_PASSED for one in self._aside)

    def _take(self, digest: str) -> bool:
        """Returns whether the adapter has a slot, now or from the request's first step on."""
        known = self._known.get(digest)
        if known is None:
            return True  # Its requests are about to end.
        known.used_at = next(self._uses)
        if digest in self._slots:
            return True
        if not self.load(digest):
            return False
        index = self._free_slot()
        if index is None:
            return False
        self._slots[index] = digest
        return True

    def _free_slot(self) -> int | None:
        if "" in self._slots:
            return self._slots.index("")
        free = set(self._slots) - self._held()
        return self._slots.index(min(free, key=self._last_use)) if free else None

    def _make_room(self) -> bool:
        """Returns whether host memory has room for one more."""
        here = [one.digest for one in self._known.values() if one.state is not _State.KNOWN]
        if len(here) < self._config.max_cpu_loras:
            return True
        held = {digest for table in self._tables for digest in table._held()}
        free = [
            digest
            for digest in here
            if digest not in held and self._known[digest].state is _State.LOADED
        ]
        if not free:
            return False
        victim = self._known[min(free, key=self._last_use)]
        victim.state = _State.KNOWN
        self.commands.append(DropAdapter(victim.digest))
        return True

    def _held(self) -> set[str]:
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

    def _last_use(self, digest: str) -> int:
        return self._known[digest].used_at

    def slot_of(self, request: Request) -> LoRASlot | None:
        """Returns where the adapter is of a request that enters a row."""
        adapter = request.spec.adapter
        if adapter is None:
            return None
        return LoRASlot(self._slots.index(adapter.digest), adapter.digest)

    # What there is ----------------------------------------------------------------------------

    def stats(self) -> LoRAStats | None:
        """Returns who has requests; None: no adapter is served."""
        if self._config.max_loras == 0:
            return None
        requests = self._requests.values()
        return LoRAStats(
            running=_digests(one for one in requests if one.status is RequestStatus.RUNNING),
            waiting=_digests(one for one in requests if one.status is not RequestStatus.RUNNING),
            loaded=[one.digest for one in self._known.values() if one.state is _State.LOADED],
        )


def share_host_memory(tables: Sequence[AdapterTable]) -> None:
    """Lets the tables of all groups know the same adapters, wherever those are in host memory."""
    first = tables[0]
    for table in tables:
        table._known, table._uses, table.commands = first._known, first._uses, first.commands
        table._tables = tables


def _digests(requests: Iterable[Request]) -> list[str]:
    found = {one.spec.adapter.digest for one in requests if one.spec.adapter is not None}
    return sorted(found)
