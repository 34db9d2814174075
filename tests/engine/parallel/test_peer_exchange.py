"""Ranks agree on whether they exchange tokens over memory that they share, and up to which size.
What the kernels compute: `test_peer_reduce`, which runs them beside the all-reduce's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.parallel import mapped_memory, peer_exchanger
from engine.parallel.distributed import ParallelGroup
from engine.parallel.mapped_memory import MAX_BYTES, MappedMemory
from engine.parallel.peer_exchanger import (
    ExchangeLimits,
    ExchangeTimes,
    PeerExchanger,
    limits_of,
    room_for,
    row_counts,
)
from engine.parallel.token_exchange import GatherScatter
from kv_transfer.errors import KVTransferError
from tests.engine.parallel.collective_scenes import CPU, play

pytest.importorskip("triton")
USE = "exchange of tokens"


class Driver:
    """The GPUs of one host, as the process of one rank sees them."""

    def __init__(self, visible: int, *, broken: str = "") -> None:
        self._visible, self._broken = visible, broken

    def device_uuids(self) -> list[bytes]:
        return [b"gpu %d" % index for index in range(self._visible)]

    def current_uuid(self) -> bytes:
        self._check("cuDeviceGetUuid")
        return b"gpu 0"

    def allocation_of(self, address: int) -> tuple[int, int]:
        return address - 256, 1 << 20

    def ipc_handle(self, address: int) -> bytes:
        self._check("cuIpcGetMemHandle")
        return address.to_bytes(8, "big")

    def open_ipc(self, handle: bytes) -> int:
        return int.from_bytes(handle, "big")

    def close_ipc(self, address: int) -> None:
        """Unmaps what nothing has mapped."""

    def _check(self, call: str) -> None:
        if call == self._broken:
            raise KVTransferError(f"{call}: invalid argument")


def connected(group: ParallelGroup) -> list[int] | None:
    """Returns the offsets of the ranks' memory from this rank's, in order; None: none is shared."""
    store = group._collectives.store  # type: ignore[attr-defined]
    memory = MappedMemory.connect(store, group.rank, group.size, CPU, 1 << 12, USE)
    group.all_reduce(torch.ones(1))  # Nobody leaves before all have read what it said.
    group.close()
    if memory is None:
        return None
    return [int(address) - memory._own.data_ptr() for address in memory.of_ranks.addresses]


@pytest.fixture
def on_one_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return partial(monkeypatch.setattr, mapped_memory, "cuda_driver")


def test_ranks_find_each_others_memory(on_one_host: Any) -> None:
    on_one_host(lambda: Driver(2))
    offsets = play(connected, 4)
    for rank, of_rank in enumerate(offsets):
        assert of_rank is not None and of_rank[rank] == 0
        assert len(set(of_rank)) == 4, "each is at an address of its own"
        assert [other - of_rank[0] for other in of_rank] == [
            other - offsets[0][0] for other in offsets[0] or ()
        ], "all mean the same memories"


@pytest.mark.parametrize(
    ("size", "call"), [(2, "cuIpcGetMemHandle"), (4, "cuIpcGetMemHandle"), (2, "cuDeviceGetUuid")]
)
def test_one_rank_without_memory_leaves_all_without(
    size: int, call: str, on_one_host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One thread's driver fails, whichever asks first: all are told, none waits, and one line of
    the log says what it was."""
    drivers = iter([Driver(2, broken=call)] + [Driver(2)] * 20)
    on_one_host(lambda: next(drivers))
    with caplog.at_level(logging.INFO, "engine.parallel.mapped_memory"):
        assert play(connected, size) == [None] * size
    assert [record.getMessage() for record in caplog.records] == [
        f"{USE}: NCCL alone, as ranks do not share memory: {call}: invalid argument"
    ]


def test_more_ranks_than_memory_has_flags_for_share_none(on_one_host: Any) -> None:
    own, memory = mapped_memory._offered(17, CPU, 1 << 12)
    assert memory is None and own.failure == "there are 17 ranks, and 16 at most may share"


def test_each_way_is_used_up_to_where_the_library_is_quicker() -> None:
    times = {
        4096: ExchangeTimes(5.0, 12.0, 5.0, 12.0),
        8192: ExchangeTimes(6.0, 12.0, 6.0, 12.0),
        16384: ExchangeTimes(7.0, 12.0, 14.0, 13.0),
        32768: ExchangeTimes(8.0, 8.0, 9.0, 13.0),
        65536: ExchangeTimes(9.0, 12.0, 9.0, 13.0),
    }
    assert limits_of(times) == ExchangeLimits(16384, 8192)
    assert limits_of({}) == ExchangeLimits(0, 0)


def test_there_is_room_for_the_largest_step() -> None:
    """The padded rows of all ranks with their slots fit in a half of the memory."""
    from tandem_kernels.collectives.peer_exchange import gathers

    for ranks, rows, width in ((2, 2048, 2048), (4, 8192, 7168), (3, 77, 2880)):
        room = room_for(ranks, rows, 2 * width)
        memory = MappedMemory(0, torch.zeros(8), room, dict.fromkeys(range(1, ranks), 0))
        assert gathers(rows, width, 2, memory.of_ranks) == (room < MAX_BYTES)
    assert [row_counts(most) for most in (1, 8, 11)] == [[1], [1, 2, 4, 8], [1, 2, 4, 8, 11]]


def test_ranks_that_time_otherwise_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes look slower than the library to rank 1 alone: the mean decides, and both gather by
    writes and sum by the library."""

    def microseconds(way: Any, *given: Tensor) -> float:
        name = getattr(way, "__name__", "library")
        rank = way.__self__._memory.rank if name != "library" else 0
        return {"_gathered": (5.0, 14.0), "_summed": (5.0, 16.0)}.get(name, (10.0,))[rank]

    monkeypatch.setattr(peer_exchanger, "microseconds_in_graph", microseconds)
    monkeypatch.setattr(PeerExchanger, "_is_right", lambda self, x, library: len(x) < 8)

    def measured(group: ParallelGroup) -> ExchangeLimits:
        memory = MappedMemory(group.rank, torch.zeros(8), 1 << 20, {1 - group.rank: 0})
        exchanger = PeerExchanger(memory)
        exchanger.measure(group._collectives, torch.float32, 16, 16)
        group.close()
        return exchanger.limits

    assert play(measured, 2) == [ExchangeLimits(gather=4 * 64, scatter=0)] * 2


@pytest.mark.parametrize("own_rows", [0, 1, 3])
def test_a_rank_with_few_rows_decides_as_the_one_with_most(own_rows: int) -> None:
    """One that went by its own would write to ranks that wait for the library."""
    exchanger = PeerExchanger(MappedMemory(0, torch.zeros(8), 1 << 20, {1: 0}))
    exchanger.limits = ExchangeLimits(gather=2 * 64, scatter=2 * 64)
    own, slots = torch.zeros(own_rows, 16), torch.zeros(own_rows, dtype=torch.int64)
    assert exchanger.gather(own, slots, 3) is None
    assert exchanger.sum_own_rows(torch.zeros(2 * 3, 16)) is None


class Exchanger:
    """Takes up to two rows, as one that a measurement has limited; says what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    def gather(self, x: Tensor, slots: Tensor, num_rows: int) -> tuple[Tensor, Tensor] | None:
        self.given.append((len(x), num_rows))
        return (
            (x.new_zeros(2 * num_rows, 4), slots.new_zeros(2 * num_rows)) if num_rows < 3 else None
        )

    def sum_own_rows(self, x: Tensor) -> Tensor | None:
        return x.new_full((len(x) // 2, 4), 7.0) if len(x) < 6 else None

    def close(self) -> None:
        """Has nothing open."""


@pytest.mark.parametrize("num_rows", [2, 3])
def test_what_writes_do_not_take_goes_by_the_library(num_rows: int) -> None:
    """Ranks decide by the rows of the largest, of which each has others."""

    def exchanged(group: ParallelGroup) -> tuple[list[float], list[float], list[tuple[int, int]]]:
        exchanger = Exchanger()
        group.exchanger = exchanger  # type: ignore[assignment]
        exchange = GatherScatter(group)
        exchange.num_rows = num_rows
        own = torch.full((1 + group.rank, 4), group.rank + 1.0)
        rows, slots = exchange.gather(own, torch.zeros(len(own), dtype=torch.int64))
        out = exchange.combine(rows.clone(), len(own))
        assert len(rows) == len(slots) == 2 * num_rows and len(out) == len(own)
        group.close()
        return rows[:, 0].tolist(), out[:, 0].tolist(), exchanger.given

    by_rank = play(exchanged, 2)
    assert [given for _, _, given in by_rank] == [[(1, num_rows)], [(2, num_rows)]]
    if num_rows == 2:
        assert [out for _, out, _ in by_rank] == [[7.0], [7.0, 7.0]]
    else:
        assert all(rows == [1.0, 0.0, 0.0, 2.0, 2.0, 0.0] for rows, _, _ in by_rank)
        assert [out for _, out, _ in by_rank] == [[2.0], [4.0, 4.0]]
