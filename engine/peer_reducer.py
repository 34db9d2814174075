"""All-reduce of small messages over GPU memory that all ranks of a host map, in place of NCCL.

    1. every rank allocates memory, and tells the others its CUDA IPC handle by the store
    2. every rank maps all others' memory, and all agree that everybody could
    3. `measure`: for each size, what is quickest is timed inside a CUDA graph; all agree on the
       sums of their times
    4. `reduce`, `reduce_norm`: None where NCCL is quicker, or what follows is done by itself
    5. `close`

Ranks whose GPUs cannot reach each other, or which are on several hosts, have none, and the log says
so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.cuda_driver import cuda_driver
from kv_transfer.wire.handshake import host_id

if TYPE_CHECKING:
    from tandem_kernels.collectives.peer_memory import ReduceTuning

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
"""Messages beyond it are NCCL's in any case."""
_SIZES = tuple(1 << power for power in range(12, 23))
_CALLS = 20
"""Calls that a graph of a measurement holds."""
_REPLAYS = 5


class _Memory(msgspec.Struct):
    """Says where a rank's memory is."""

    host: str
    handle: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class ReduceLimits:
    """The largest messages, in bytes, that are reduced in one shot and in two; 0: none."""

    one_shot: int = 0
    two_shot: int = 0

    @classmethod
    def parse(cls, text: str) -> ReduceLimits:
        """Reads "131072,2097152"; beyond `MAX_BYTES` there is no room."""
        return cls(*(min(int(part), MAX_BYTES) for part in text.split(",")))

    def __str__(self) -> str:
        return f"one-shot up to {self.one_shot} bytes, two-shot up to {self.two_shot}, NCCL beyond"


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """Says what a setting asks for.

    Attributes:
        limits: None: measured.
        pushes: Ranks write into each other's memory, in place of reading it.
        fuses_norm: What follows a sum, the residual stream and its norm, is in the same launch.
    """

    limits: ReduceLimits | None = None
    pushes: bool = False
    fuses_norm: bool = False

    @classmethod
    def parse(cls, text: str) -> ReducePlan:
        """Reads "auto" or limits, and what may follow: "auto+push+norm"."""
        limits, *extras = text.split("+")
        return cls(
            None if limits == "auto" else ReduceLimits.parse(limits),
            "push" in extras,
            "norm" in extras,
        )


class PeerReducer:
    """Rank `rank` of as many as `addresses` has. Made by `connect`."""

    def __init__(
        self, rank: int, memory: Tensor, mapped: dict[int, int], plan: ReducePlan | None = None
    ) -> None:
        addresses = [mapped.get(peer, memory.data_ptr()) for peer in range(len(mapped) + 1)]
        self._rank = rank
        self._memory = memory
        self._mapped = mapped
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._opened: list[int] = []
        self.plan = plan or ReducePlan()
        self.limits = self.plan.limits or ReduceLimits(MAX_BYTES // 16, MAX_BYTES)
        self.times: dict[int, list[float]] = {}
        """Microseconds of a call by bytes, as measured: in one shot, in two, and NCCL's."""

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        plan: ReducePlan | None = None,
    ) -> PeerReducer | None:
        """Returns None where some rank cannot map another's memory; then no rank has one."""
        from tandem_kernels.collectives.peer_memory import MAX_RANKS, memory_bytes

        if size > MAX_RANKS:
            return None
        memory = torch.zeros(memory_bytes(MAX_BYTES), dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        driver = cuda_driver()
        start, _ = driver.allocation_of(memory.data_ptr())
        own = _Memory(host_id(), driver.ipc_handle(start), memory.data_ptr() - start)
        store.set(f"reduce memory {rank}", msgspec.json.encode(own).decode())
        opened: list[int] = []
        mapped: dict[int, int] = {}
        failure = ""
        try:
            for peer in range(size):
                data = store.get(f"reduce memory {peer}")
                of_peer = msgspec.json.decode(bytes(data), type=_Memory)
                if of_peer.host != own.host:
                    raise KVTransferError(f"rank {peer} is on another host")
                if peer != rank:
                    opened.append(driver.open_ipc(of_peer.handle))
                    mapped[peer] = opened[-1] + of_peer.offset
        except KVTransferError as error:
            failure = str(error) or type(error).__name__
        store.set(f"reduce failure {rank}", failure)
        failures = [bytes(store.get(f"reduce failure {peer}")).decode() for peer in range(size)]
        if why := next(filter(None, failures), ""):
            for address in opened:
                driver.close_ipc(address)
            if rank == 0:
                logger.info("all-reduce: NCCL alone, as ranks do not share memory: %s", why)
            return None
        reducer = cls(rank, memory, mapped, plan)
        reducer._opened = opened
        return reducer

    def reduce(self, x: Tensor) -> Tensor | None:
        """Returns the sum over ranks; None: the message is too large, or of another type."""
        num_bytes = x.numel() * x.element_size()
        if num_bytes == 0 or num_bytes > max(self.limits.one_shot, self.limits.two_shot):
            return None
        if not x.is_floating_point() or x.element_size() not in (2, 4):
            return None
        return self.reduce_by(x, two_shot=num_bytes > self.limits.one_shot, pushes=self.plan.pushes)

    def reduce_by(
        self,
        x: Tensor,
        *,
        two_shot: bool,
        pushes: bool = False,
        tuning: ReduceTuning | None = None,
    ) -> Tensor:
        """Returns the sum over ranks of at most `MAX_BYTES`, by one of the ways that there are."""
        from tandem_kernels.collectives.peer_push import peer_push
        from tandem_kernels.collectives.peer_reduce import TUNING, peer_reduce

        given = x.contiguous().view(-1), self._addresses, self._rank, MAX_BYTES
        if pushes:
            summed = peer_push(*given, two_shot=two_shot, tuning=tuning)
        else:
            summed = peer_reduce(*given, two_shot=two_shot, tuning=tuning or TUNING)
        return summed.view(x.shape)

    def reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Returns the norm [T, H] of `residual`, which becomes the sum of itself and of `x` over
        ranks; None, with nothing changed: these are better done one after the other."""
        from tandem_kernels.collectives.peer_reduce_norm import peer_reduce_norm, reduces_norm

        if x.numel() * x.element_size() > max(self.limits.one_shot, self.limits.two_shot):
            return None
        if not reduces_norm(x, residual, len(self._addresses), MAX_BYTES):
            return None
        place = self._addresses, self._rank, MAX_BYTES
        return peer_reduce_norm(x.contiguous(), residual, weight, eps, *place)

    def measure(self, library: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        """Sets the limits to where `library`, NCCL's all-reduce, becomes quicker."""
        ways: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: self.reduce_by(x, two_shot=False, pushes=self.plan.pushes),
            lambda x: self.reduce_by(x, two_shot=True, pushes=self.plan.pushes),
            library,
        )
        device = self._memory.device
        rows = []
        for size in _SIZES:
            x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
            rows.append([microseconds_in_graph(way, x) for way in ways])
        sums = library(torch.tensor(rows, dtype=torch.float32, device=device))
        means = (sums / len(self._addresses)).tolist()
        self.times = dict(zip(_SIZES, means, strict=True))
        self.limits = limits_of(self.times)
        if self._rank == 0:
            of_sizes = ", ".join(
                f"{size}: " + " / ".join(f"{time:.1f}" for time in row)
                for size, row in self.times.items()
            )
            what = "all-reduce: %s; bytes: us one-shot / two-shot / NCCL: %s"
            logger.info(what, self.limits, of_sizes)

    def close(self) -> None:
        """Unmaps the others' memory. Idempotent."""
        for address in self._opened:
            cuda_driver().close_ipc(address)
        self._opened = []


def limits_of(times: dict[int, list[float]]) -> ReduceLimits:
    """Returns the limits for measured (one-shot, two-shot, library) times by size: each way is used
    up to the last size before another one is quicker."""
    one_shot = two_shot = 0
    for size, (one, two, library) in sorted(times.items()):
        if library <= min(one, two):
            break
        two_shot = size
        if one <= two and one_shot == _before(size, times):
            one_shot = size
    return ReduceLimits(one_shot, two_shot)


def _before(size: int, times: dict[int, list[float]]) -> int:
    return max((other for other in times if other < size), default=0)


def microseconds_in_graph(way: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Returns how long a call takes inside a graph."""
    for _ in range(3):
        way(x)
    torch.cuda.synchronize(x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            way(x)
    event: Any = torch.cuda.Event
    began, ended = (event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    for _ in range(_REPLAYS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize(x.device)
    return float(began.elapsed_time(ended)) * 1000 / (_CALLS * _REPLAYS)
