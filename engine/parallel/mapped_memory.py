"""GPU memory that all ranks of a host map, for kernels that exchange numbers over it.

1. every rank allocates memory, and tells the others its CUDA IPC handle by the store, or why it
   has none
2. every rank maps all others' memory, and all agree that all could; else none has any,
   and the log says why
3. a `PeerReducer` or a `PeerExchanger` counts calls in it: memory is for one of them
4. `close`
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.devices.cuda_driver import cuda_driver
from kv_transfer.wire.handshake import host_id

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Larger messages are NCCL's in any case. Each rank shares four times as much memory as its largest
message needs."""


class RankMemory(msgspec.Struct):
    """Says where a rank's memory is: on which host and GPU, and what maps it; or why none is."""

    host: str
    gpu: bytes
    handle: bytes
    offset: int
    failure: str = ""


class MappedMemory:
    """Memory of rank `rank` and of all others. Made by `connect`.

    Args:
        memory: This rank's, zeroed; `tandem_kernels.collectives.peer_memory` says what is where.
        max_bytes: Of a message.
        mapped: Addresses of the others' memory by rank.
        opened: Of these, what `close` unmaps.
    """

    def __init__(
        self,
        rank: int,
        memory: Tensor,
        max_bytes: int,
        mapped: dict[int, int],
        opened: Sequence[int] = (),
    ) -> None:
        from tandem_kernels.collectives.peer_memory import RankMemories

        addresses = [mapped.get(peer, memory.data_ptr()) for peer in range(len(mapped) + 1)]
        of_ranks = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._own = memory
        self._opened = list(opened)
        self.of_ranks = RankMemories(of_ranks, rank, max_bytes)
        """Kernels take this."""

    @classmethod
    def connect(
        cls, store: Store, rank: int, size: int, device: torch.device, max_bytes: int, use: str
    ) -> MappedMemory | None:
        """Returns None where some rank cannot map another's memory; then no rank has any. `use`:
        what it is for, as the log and the store call it."""
        own, memory = _offered(size, device, max_bytes)
        store.set(f"{use}: memory {rank}", msgspec.json.encode(own).decode())
        opened: list[int] = []
        mapped: dict[int, int] = {}
        failure = ""
        try:
            for peer in range(size):
                data = store.get(f"{use}: memory {peer}")
                of_peer = msgspec.json.decode(bytes(data), type=RankMemory)
                if of_peer.failure:
                    raise KVTransferError(of_peer.failure)
                if peer != rank and not own.failure:
                    check_reach(own, of_peer, peer)
                    opened.append(cuda_driver().open_ipc(of_peer.handle))
                    mapped[peer] = opened[-1] + of_peer.offset
        except KVTransferError as error:
            failure = str(error) or type(error).__name__
        store.set(f"{use}: failure {rank}", failure)
        failures = [bytes(store.get(f"{use}: failure {peer}")).decode() for peer in range(size)]
        if why := next(filter(None, failures), ""):
            for address in opened:
                cuda_driver().close_ipc(address)
            if rank == 0:
                logger.info("%s: NCCL alone, as ranks do not share memory: %s", use, why)
            return None
        assert memory is not None, "a rank without memory says so"
        return cls(rank, memory, max_bytes, mapped, opened)

    @property
    def device(self) -> torch.device:
        return self._own.device

    @property
    def rank(self) -> int:
        return self.of_ranks.rank

    @property
    def ranks(self) -> int:
        return self.of_ranks.ranks

    @property
    def max_bytes(self) -> int:
        return self.of_ranks.max_bytes

    def close(self) -> None:
        """Unmaps the others' memory. Idempotent."""
        for address in self._opened:
            cuda_driver().close_ipc(address)
        self._opened = []


def _offered(size: int, device: torch.device, max_bytes: int) -> tuple[RankMemory, Tensor | None]:
    """Returns this rank's memory and what tells others of it, or why there is none."""
    from tandem_kernels.collectives.peer_memory import MAX_RANKS, memory_bytes

    try:
        if size > MAX_RANKS:
            raise KVTransferError(f"there are {size} ranks, and {MAX_RANKS} at most may share")
        memory = torch.zeros(memory_bytes(max_bytes), dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        driver = cuda_driver()
        start, _ = driver.allocation_of(memory.data_ptr())
        offset = memory.data_ptr() - start
        own = RankMemory(host_id(), driver.current_uuid(), driver.ipc_handle(start), offset)
    except (KVTransferError, torch.OutOfMemoryError) as error:
        return RankMemory(host_id(), b"", b"", 0, str(error) or type(error).__name__), None
    return own, memory


def check_reach(own: RankMemory, of_peer: RankMemory, peer: int) -> None:
    """Raises `KVTransferError` where a kernel cannot write to a peer's memory and tell it so."""
    if of_peer.host != own.host:
        raise KVTransferError(f"rank {peer} is on another host")
    if of_peer.gpu == own.gpu:
        return
    driver = cuda_driver()
    visible = driver.device_uuids()
    if of_peer.gpu not in visible:
        raise KVTransferError(f"the GPU of rank {peer} is hidden from a rank's process")
    if not driver.has_native_atomics(visible.index(own.gpu), visible.index(of_peer.gpu)):
        raise KVTransferError(f"the link to rank {peer} has no atomic operations; is it NVLink?")
