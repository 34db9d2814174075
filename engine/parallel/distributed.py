"""Collectives of one group of ranks: gloo on CPU (sums of two over a socket), NCCL on CUDA.

Life of a group:
    1. Every rank is given the same rendezvous address. Rank 0 listens there, on that address only.
    2. Ranks meet in a store and connect to each other, each listening on its own host's address.
    3. The model calls `all_reduce` and `all_gather`, every rank in the same order.
    4. `close` at shutdown. A rank that dies makes the others' next collective fail.

A group of one does nothing and opens nothing. Results are the same bits on every rank, so all
ranks sample the same token.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from engine.parallel import peer_exchanger, peer_reducer
from engine.parallel.mapped_memory import MappedMemory
from engine.parallel.peer_exchanger import PeerExchanger
from engine.parallel.peer_reducer import PeerReducer, ReduceLimits
from engine.parallel.socket_pair import SocketPair

_TIMEOUT_S = 120.0


class Collectives(Protocol):
    """The part of a transport that a group needs."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums `x` over ranks; the sum may be computed in place."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Gathers every rank's `x`, in the order of ranks."""

    def gather_rows(self, x: Tensor) -> Tensor:
        """Gathers every rank's rows, in the order of ranks."""

    def sum_own_rows(self, x: Tensor, rank: int) -> Tensor:
        """Sums `x` over ranks and returns the part of `rank`, this one; see `ParallelGroup`."""

    def exchange_rows(
        self, x: Tensor, counts: Sequence[int], out: Tensor, counts_out: Sequence[int]
    ) -> None:
        """Sends rows to each rank; see `ParallelGroup`."""

    def close(self) -> None:
        """Releases sockets and threads."""


class ParallelGroup:
    """Rank `rank` of `size`.

    Args:
        device: Where the tensors live; decides the transport.
        store: What the ranks of several groups meet in, in place of `rendezvous`.
        rendezvous: "host:port", free on the host of rank 0. Unused for a group of one.
        address: Of this rank's host, as the others reach it. The host of `rendezvous` by default.
        timeout_s: A rank that others wait for longer than this counts as dead.
        fixed_order: Ranks' numbers are added in the order of ranks, in float32, and rounded once.
            Of more than two, libraries choose the order by how many numbers there are, and by where
            among them one is; of two, every way gives these bits.
        store: Where the ranks of this group meet, if the engine has several groups; then
            `rendezvous` is only where that was.

    Raises:
        ConnectionError: The ranks did not meet within `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        rendezvous: str = "",
        timeout_s: float = _TIMEOUT_S,
        address: str = "",
        fixed_order: bool = False,
        store: Store | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._fixed_order = fixed_order
        self._adds_in_order = fixed_order and size > 2
        self._collectives: Collectives = _Alone()
        self._device = device
        self._is_cuda = torch.device(device).type == "cuda"
        self.reducer: PeerReducer | None = None
        """Sums small messages; None: the library sums all."""
        self.exchanger: PeerExchanger | None = None
        """Gathers and sums rows; None: the library does."""
        if size > 1:
            kind = torch.device(device).type
            timeout = timedelta(seconds=timeout_s)
            if store is None:
                store = meet(rank, size, rendezvous, timeout)
            host = address or host_of(rendezvous)
            self._collectives = _connect(kind, rank, size, store, timeout, host)

    def share_memory(
        self,
        dtype: torch.dtype,
        hidden_size: int,
        num_rows: int,
        limits: ReduceLimits | None = None,
    ) -> None:
        """Lets sums of up to `num_rows` rows go over memory that all ranks map, where that is
        possible: up to `limits`, or, without, up to where a measurement finds the library
        quicker."""
        step_bytes = num_rows * hidden_size * dtype.itemsize
        memory = self._mapped_memory(peer_reducer.room_for(step_bytes), "all-reduce")
        if memory is None:
            return
        reducer = PeerReducer(memory, limits)
        if limits is None:
            reducer.measure(self._collectives.all_reduce, dtype, hidden_size)
        self.reducer = reducer

    def exchange_by_writes(self, dtype: torch.dtype, hidden_size: int, num_rows: int) -> None:
        """Lets up to `num_rows` rows of each rank be gathered, and their sums returned, over memory
        that all ranks map, where that is possible, and up to where a measurement finds the library
        quicker."""
        room = peer_exchanger.room_for(self.size, num_rows, hidden_size * dtype.itemsize)
        memory = self._mapped_memory(room, "exchange of tokens")
        if memory is None:
            return
        exchanger = PeerExchanger(memory)
        exchanger.measure(self._collectives, dtype, hidden_size, num_rows)
        self.exchanger = exchanger

    def _mapped_memory(self, max_bytes: int, use: str) -> MappedMemory | None:
        """Returns memory that ranks share on GPUs; None: they have none in common, or this one is
        alone or on a CPU."""
        if not isinstance(self._collectives, _Backend) or not self._is_cuda:
            return None
        store, device = self._collectives.store, torch.device(self._device)
        return MappedMemory.connect(store, self.rank, self.size, device, max_bytes, use)

    @property
    def fuses_norm(self) -> bool:
        """Returns whether a sum had better wait for the norm behind it; see `reduce_norm`. In fixed
        order never: whether both are one launch depends on how many rows there are."""
        return self.reducer is not None and self.reducer.limits.norm > 0 and not self._fixed_order

    def reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Adds the sum of `x` [T, H] over ranks to `residual` and returns its norm, in one launch;
        None, with nothing changed: do one after the other."""
        if self.reducer is None:
            return None
        return self.reducer.reduce_norm(x, residual, weight, eps)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums `x` over ranks. `x` may be overwritten."""
        if self.reducer is not None and (summed := self.reducer.reduce(x)) is not None:
            return summed
        if not self._adds_in_order:
            return self._collectives.all_reduce(x)
        return _added(self._collectives.all_gather(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers [..., n] of each rank to [..., size * n], in the order of ranks."""
        parts = self._collectives.all_gather(x)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def gather_rows(self, x: Tensor) -> Tensor:
        """Gathers [n, ...] of each rank to [size * n, ...], in the order of ranks."""
        return x if self.size == 1 else self._collectives.gather_rows(x)

    def sum_own_rows(self, x: Tensor) -> Tensor:
        """Sums [size * n, ...] over ranks, and returns this rank's n rows: what a rank put in its
        place of `gather_rows`. `x` may be overwritten."""
        if self.size == 1:
            return x
        if self.exchanger is not None and (summed := self.exchanger.sum_own_rows(x)) is not None:
            return summed
        if not self._adds_in_order:
            return self._collectives.sum_own_rows(x, self.rank)
        of_ranks = [part.chunk(self.size)[self.rank] for part in self._collectives.all_gather(x)]
        return _added(of_ranks)

    def exchange_rows(
        self, x: Tensor, counts: Sequence[int], out: Tensor, counts_out: Sequence[int]
    ) -> None:
        """Sends the next `counts[r]` rows of `x` to each rank r, this one included, and fills `out`
        with those that each sends to this one, `counts_out[r]`, in the order of ranks."""
        self._collectives.exchange_rows(x, counts, out, counts_out)

    def close(self) -> None:
        for over_memory in (self.reducer, self.exchanger):
            if over_memory is not None:
                over_memory.close()
        self.reducer = self.exchanger = None
        self._collectives.close()
        self._collectives = _Alone()

    def __enter__(self) -> ParallelGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _added(parts: list[Tensor]) -> Tensor:
    """Adds in order, in float32, and rounds once: as `peer_reduce` does, so that how many numbers
    there are does not change what becomes of one."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class _Alone:
    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def gather_rows(self, x: Tensor) -> Tensor:
        return x

    def sum_own_rows(self, x: Tensor, rank: int) -> Tensor:
        return x

    def exchange_rows(
        self, x: Tensor, counts: Sequence[int], out: Tensor, counts_out: Sequence[int]
    ) -> None:
        out.copy_(x)

    def close(self) -> None:
        """Does nothing, as nothing is open."""


class _Backend:
    """Collectives over one of torch's process groups, without torch's process-wide default."""

    def __init__(self, group: Any, store: Store, size: int) -> None:
        self._group = group
        self.store = store
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._group.allgather([parts], [x]).wait()
        return parts

    def gather_rows(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty((self._size * len(x), *x.shape[1:]))
        self._group._allgather_base(out, x).wait()
        return out

    def sum_own_rows(self, x: Tensor, rank: int) -> Tensor:
        x = x.contiguous()
        out = x.new_empty((len(x) // self._size, *x.shape[1:]))
        self._group._reduce_scatter_base(out, x).wait()
        return out

    def exchange_rows(
        self, x: Tensor, counts: Sequence[int], out: Tensor, counts_out: Sequence[int]
    ) -> None:
        self._group.alltoall_base(out, x, list(counts_out), list(counts)).wait()

    def close(self) -> None:
        del self._group, self.store


class _Gloo(_Backend):
    """Any number of ranks on CPU. Not every release of gloo scatters sums."""

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat(self.all_gather(x))

    def sum_own_rows(self, x: Tensor, rank: int) -> Tensor:
        return self.all_reduce(x).chunk(self._size)[rank]


class _GlooPair(_Gloo):
    """Two ranks on CPU: both send, and receive what the other has. Takes a tenth of the time of
    gloo's all-reduce for the few kilobytes of a decode step, and has none of its 4 ms tail."""

    def __init__(self, group: Any, store: Store, rank: int, pair: SocketPair) -> None:
        super().__init__(group, store, size=2)
        self._rank, self._pair = rank, pair

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        return x.add_(self._pair.exchange(x))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        other = self._pair.exchange(x)
        return [x, other] if self._rank == 0 else [other, x]

    def close(self) -> None:
        self._pair.close()
        super().close()


def _connect(
    kind: str, rank: int, size: int, store: Store, timeout: timedelta, host: str
) -> Collectives:
    if kind == "cuda":
        return _Backend(connect_nccl(store, rank, size, timeout), store, size)
    gloo = connect_gloo(store, rank, size, host, timeout)
    if size > 2:
        return _Gloo(gloo, store, size)
    return _GlooPair(gloo, store, rank, SocketPair(store, rank, host, timeout))


def host_of(rendezvous: str) -> str:
    return rendezvous.rpartition(":")[0]


def meet(rank: int, size: int, rendezvous: str, timeout: timedelta) -> TCPStore:
    """Returns a store in which `size` ranks meet. Raises `ConnectionError`."""
    host, port = host_of(rendezvous), int(rendezvous.rpartition(":")[2])
    try:
        return _open_store(rank, size, host, port, timeout)
    except (RuntimeError, OSError) as error:
        raise ConnectionError(
            f"rank {rank} of {size} found no parallel group at {rendezvous}: {error}; "
            "check that all workers started and that the port is free"
        ) from error


def _open_store(rank: int, size: int, host: str, port: int, timeout: timedelta) -> TCPStore:
    """Opens the store on a socket that we bind: by itself it would listen on every interface."""
    if rank > 0:
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen()
        return TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def connect_gloo(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    """Builds Gloo on one interface. `_Options` is the only way to name the interface; torch's type
    stubs do not list it.
    """
    backend: Any = ProcessGroupGloo
    options = backend._Options()
    options._timeout = timeout
    options._devices = [backend.create_device(hostname=host)]
    return backend(store, rank, size, options)


def connect_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Builds NCCL on the current device."""
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)
