"""The ledger of an engine's adapters, for all workers: where each is, and which calls wait for it.

    KNOWN ──a call adds it, or a request wants it──▶ LOADING ──all ranks have it──▶ LOADED
      ▲                                                 │                     in host memory
      ├── could not be read: who waits for it ends ◀────┘                           │
      └──────────────────── least recently used, and nothing runs ◀──────────────────┘

- Every call has an answer. An adapter that is added is answered for once all ranks have read it,
  one that is removed when its last request has ended, or when it is added again. A read that takes
  longer than `READ_TIMEOUT_S` fails the calls that wait for it; what ranks report later still
  counts.
- An adapter that was served stays known when a read fails: the next request tries again. One that
  never was is forgotten.
- An adapter that is added while host memory is full of those in use is read nevertheless, and
  dropped again: that it can be served is known before it is said.
- An adapter that is removed takes no more requests and is forgotten when the last one has ended.

Workers are notified of it by `commands`, in order with the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Protocol

from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.messages import AdapterAnswer
from engine.lora import LoRAConfig

READ_TIMEOUT_S = 90.0
"""Less than a call waits for its answer, so that the answer says why."""


class _State(Enum):
    KNOWN = "known"
    LOADING = "loading"
    LOADED = "loaded"


@dataclass(slots=True)
class _Adapter:
    digest: str
    path: str
    """Is the folder where ranks have read it, or shall."""
    state: _State = _State.KNOWN
    used_at: int = 0
    """Counts uses of any adapter."""
    is_served: bool = False
    """A call that added it was answered, so names stand for it."""
    is_leaving: bool = False
    adding: list[int] = field(default_factory=list)
    """Calls that wait until ranks have read it."""
    removing: list[int] = field(default_factory=list)
    """Calls that wait until it is forgotten."""
    reading: str = ""
    """The folder that ranks read now."""
    read_since: float = 0.0
    is_overdue: bool = False
    """Ranks read it for too long: nothing waits for it."""
    answers: list[str] = field(default_factory=list)
    """Keeps what ranks have said of the read so far: an error, or nothing."""


class AdapterUsers(Protocol):
    """The requests of one group, and the slots that they have: an `AdapterTable`."""

    def held(self) -> set[str]: ...
    def requests_of(self, digest: str) -> list[str]: ...
    def empty_slot(self, digest: str) -> None: ...


class EngineAdapters:
    """The ledger of one engine's adapters, by digest. `num_ranks` answer each `LoadAdapter`.

    Attributes:
        commands: To be sent to the workers, in order, before the next step.
        tables: Those of all groups.
    """

    def __init__(
        self, config: LoRAConfig, num_ranks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.commands: list[LoadAdapter | DropAdapter] = []
        self.tables: Sequence[AdapterUsers] = ()
        self._num_ranks = num_ranks
        self._clock = clock
        self._known: dict[str, _Adapter] = {}
        self._answers: list[AdapterAnswer] = []
        self._uses = count(1)
        for index, module in enumerate(config.modules):
            is_loaded = index < config.max_cpu_loras
            self._known[module.digest] = _Adapter(
                module.digest,
                module.path,
                state=_State.LOADED if is_loaded else _State.KNOWN,
                is_served=True,
            )

    # Calls ------------------------------------------------------------------------------------

    def add(self, call_id: int, digest: str, path: str) -> None:
        """Makes an adapter known. Removals of it that wait are answered: its weights stay."""
        known = self._known.setdefault(digest, _Adapter(digest, path))
        known.is_leaving = False
        self._answer(known.removing)
        if known.state is _State.LOADED:
            known.path, known.is_served = path, True
            self._answers.append(AdapterAnswer(call_id))
        elif known.is_overdue:
            self._answers.append(AdapterAnswer(call_id, _overdue(known)))
        else:
            known.adding.append(call_id)
            if known.state is _State.KNOWN:
                self._make_room()
                self._read(known, path)

    def remove(self, call_id: int, digest: str) -> None:
        """Takes an adapter out of use. The call is answered when it is forgotten."""
        known = self._known.get(digest)
        if known is None:
            self._answers.append(AdapterAnswer(call_id))
            return
        known.is_leaving = True
        known.removing.append(call_id)

    def take_answers(self) -> list[AdapterAnswer]:
        """Returns the answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def leftovers(self) -> list[str]:
        """Names the adapters that calls or reads still wait for."""
        return [
            f"adapter {one.digest[:12]} on its way"
            for one in sorted(self._known.values(), key=lambda one: one.digest)
            if one.adding or one.removing or one.state is _State.LOADING
        ]

    def _answer(self, calls: list[int], error: str = "") -> None:
        self._answers += [AdapterAnswer(call_id, error) for call_id in calls]
        calls.clear()

    # Workers read -----------------------------------------------------------------------------

    def load(self, digest: str) -> bool:
        """Sees to it that an adapter is in host memory, or will be, for a request. Returns whether
        it is."""
        known = self._known[digest]
        known.used_at = next(self._uses)
        if known.state is _State.KNOWN and self._make_room():
            self._read(known, known.path)
        return known.state is _State.LOADED

    def _read(self, known: _Adapter, path: str) -> None:
        known.state, known.reading, known.read_since = _State.LOADING, path, self._clock()
        self.commands.append(LoadAdapter(known.digest, path))

    def replied(self, digest: str, error: str) -> dict[str, str]:
        """Takes what a rank says of an adapter that it was to load; `error`: why it could not.
        Returns the requests that must end, with the reason."""
        known = self._known[digest]
        known.answers.append(error)
        if len(known.answers) < self._num_ranks:
            return {}
        fault = next(filter(None, known.answers), "")
        known.answers, known.is_overdue = [], False
        return self._failed(known, fault) if fault else self._loaded(known)

    def check(self) -> dict[str, str]:
        """Fails the calls that wait for reads that take too long, and forgets removed adapters that
        no request wants. Returns the requests that must end, with the reason."""
        ends: dict[str, str] = {}
        late = self._clock() - READ_TIMEOUT_S
        for known in self._known.values():
            if known.state is _State.LOADING and not known.is_overdue and known.read_since < late:
                known.is_overdue = True
                self._answer(known.adding, _overdue(known))
                self._answer(known.removing)
                ends |= dict.fromkeys(self._requests_of(known.digest), _overdue(known))
        self._forget_leaving()
        return ends

    def _loaded(self, known: _Adapter) -> dict[str, str]:
        known.state, known.path = _State.LOADED, known.reading
        known.used_at = next(self._uses)
        known.is_served = known.is_served or bool(known.adding)
        self._answer(known.adding)
        self._make_room(self.config.max_cpu_loras + 1)
        self._forget_unserved(known)
        return {}

    def _failed(self, known: _Adapter, error: str) -> dict[str, str]:
        """Ends the calls that wait for it; but requests whose adapter was read before from another
        folder have it read from there."""
        known.state = _State.KNOWN
        self.commands.append(DropAdapter(known.digest))
        self._answer(known.adding, error)
        is_own = known.reading == known.path
        ends = dict.fromkeys(self._requests_of(known.digest), error) if is_own else {}
        self._forget_unserved(known)
        return ends

    def _forget_unserved(self, known: _Adapter) -> None:
        if not known.is_served:
            self._forget(known)

    def _forget_leaving(self) -> None:
        leaving = [
            one
            for one in self._known.values()
            if one.is_leaving and one.state is not _State.LOADING
        ]
        for known in leaving:
            if not self._requests_of(known.digest):
                self._forget(known)

    def _forget(self, known: _Adapter) -> None:
        if known.state is _State.LOADED:
            self.commands.append(DropAdapter(known.digest))
        del self._known[known.digest]
        for table in self.tables:
            table.empty_slot(known.digest)
        self._answer(known.removing)

    def _make_room(self, below: int | None = None) -> bool:
        """Returns whether host memory has room for one more, of `below` in all."""
        below = self.config.max_cpu_loras if below is None else below
        here = [one for one in self._known.values() if one.state is not _State.KNOWN]
        held = {digest for table in self.tables for digest in table.held()}
        free = [one for one in here if one.digest not in held and one.state is _State.LOADED]
        free.sort(key=lambda one: one.used_at)
        num_excess = len(here) - below + 1
        for victim in free[: max(0, num_excess)]:
            victim.state = _State.KNOWN
            self.commands.append(DropAdapter(victim.digest))
        return num_excess <= len(free)

    def _requests_of(self, digest: str) -> list[str]:
        """Returns the ids of all requests that want an adapter."""
        return [name for table in self.tables for name in table.requests_of(digest)]

    # What there is ----------------------------------------------------------------------------

    def refusal(self, name: str, digest: str) -> str:
        """Returns why no request can use an adapter; empty when it can."""
        known = self._known.get(digest)
        if known is None or known.is_leaving or not known.is_served:
            return f"adapter {name} is not loaded here; load it with /v1/load_lora_adapter"
        return _overdue(known) if known.is_overdue else ""

    def last_use(self, digest: str) -> int:
        """Returns a number that is larger the later an adapter was wanted last."""
        return self._known[digest].used_at

    def loaded(self) -> list[str]:
        """Returns the adapters in host memory."""
        return [one.digest for one in self._known.values() if one.state is _State.LOADED]


def _overdue(known: _Adapter) -> str:
    return (
        f"the adapter in {known.reading} cannot be read: its disk has not answered for "
        f"{READ_TIMEOUT_S:.0f} s"
    )
