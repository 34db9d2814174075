"""Keeps what is asked of the store, and which blocks it is still to be given: the half beside the
scheduler.

    stored in host memory ──▶ due ──▶ being put ──▶ given
                                          └── the store did not take it: forgotten; it is due
                                              again when it is stored again

Nothing here says what the store has: others give it blocks, and it evicts them. It is asked.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kv_transfer.tier import AskMeta, StoreFound, TierCommand
from kv_transfer.tiers.slot_table import SlotTable

_MOST_PUT = 16
"""Blocks that one job gives to the store; there is one such job at a time."""
_MOST_DUE = 4096
_MOST_KNOWN = 1 << 16
"""Blocks that were given and are not given again; a block that the store has evicted meanwhile is
missed there until it is forgotten here."""


class StoreIndex:
    """`send` passes a command to a process, by number; False: it is down."""

    def __init__(self, num_processes: int, send: Callable[[int, TierCommand], bool]) -> None:
        self.is_on = True
        self.is_putting = False
        self.totals = Counter[str]()
        self._num_processes = num_processes
        self._send = send
        self._due: OrderedDict[bytes, None] = OrderedDict()
        self._given: OrderedDict[bytes, None] = OrderedDict()
        self._asked: dict[int, set[int]] = {}
        self._common: dict[int, set[int]] = {}
        self._found: dict[int, list[int]] = {}

    @property
    def counters(self) -> dict[str, float]:
        names = ("put", "fetched", "missed")
        return {f"store_tier_{name}_blocks": float(self.totals[name]) for name in names}

    # Blocks that it is given ------------------------------------------------------------------

    def stored(self, names: Iterable[bytes]) -> None:
        """Records that host memory has these now. Of too many the oldest are not given."""
        if self.is_on:
            self._due.update(dict.fromkeys(name for name in names if name not in self._given))
        while len(self._due) > _MOST_DUE:
            self._due.popitem(last=False)

    def next_due(self, slots: SlotTable) -> list[tuple[bytes, int]]:
        """Takes blocks to be given now, with their slots; those that host memory has displaced are
        left out."""
        found: list[tuple[bytes, int]] = []
        while self._due and len(found) < _MOST_PUT:
            name, _ = self._due.popitem(last=False)
            if name in slots.stored:
                found.append((name, slots.stored[name]))
        self.is_putting = bool(found)
        return found

    def given(self, names: Sequence[bytes]) -> None:
        """Records that it has these. Ends the job of `next_due`."""
        self.is_putting = False
        self.totals["put"] += len(names)
        self.known(names)

    def known(self, names: Iterable[bytes]) -> None:
        """Records blocks that it has, or had when they came from there."""
        for name in names:
            self._given[name] = None
            self._given.move_to_end(name)
        while len(self._given) > _MOST_KNOWN:
            self._given.popitem(last=False)

    def came(self, whole: Sequence[bytes], failed: Sequence[bytes]) -> None:
        """Records what it gave, and what it said it had and did not give."""
        self.totals["fetched"] += len(whole)
        self.totals["missed"] += len(failed)
        self.known(whole)
        for name in failed:
            self._given.pop(name, None)

    def clear(self) -> None:
        """Forgets what it was to be given."""
        self._due.clear()

    def turn_off(self) -> None:
        self.is_on = False
        self.clear()

    # Questions --------------------------------------------------------------------------------

    def ask(self, job: int, names: list[bytes], *, is_chain: bool) -> None:
        """Asks every process for its share of these blocks."""
        self._asked[job] = set(range(self._num_processes))
        self._common[job] = set(range(len(names)))
        for process in range(self._num_processes):
            if not self._send(process, AskMeta(job, names, is_chain)):
                self._answer(job, process, ())

    def answered(self, event: StoreFound) -> None:
        self._answer(event.job, event.process, event.found)

    def process_is_gone(self, process: int) -> None:
        for job in list(self._asked):
            self._answer(job, process, ())

    def _answer(self, job: int, process: int, found: Iterable[int]) -> None:
        left = self._asked.get(job)
        if left is None or process not in left:
            return
        left.discard(process)
        self._common[job].intersection_update(found)
        if not left:
            del self._asked[job]
            self._found[job] = sorted(self._common.pop(job))

    def take_found(self) -> dict[int, list[int]]:
        """Returns questions that were answered: which blocks every process has its share of."""
        found, self._found = self._found, {}
        return found
