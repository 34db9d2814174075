"""The configuration that a transfer process is given at its start."""

from __future__ import annotations

import msgspec

from edge.logs.setup import LogStyle
from host.child_process import ipc_address
from host.life_signs import LifeSignHandle
from host.sockets.secure_socket import HostLink
from kv_transfer.base import KVCacheHandle
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout


class TransferProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer process.

    Attributes:
        index: Of this process among those of its rank.
        generation: Grows with every restart, so that commands to a dead process reach nothing.
        port: That a former life of this process listened on (producer). 0: none did.
        start_delay_s: It waits this long before it starts, because its predecessors died young.
        link: To the engine core on another host; None on the same host.
        remote_events_address: Where the engine core listens for processes of other hosts.
        life_sign: Where it gives signs of life, on the engine core's host. On another one its
            reports are them.
    """

    transfer: KVTransferConfig
    engine_id: str
    epoch: int
    layout: KVLayout
    handle: KVCacheHandle
    index: int
    generation: int = 0
    port: int = 0
    start_delay_s: float = 0.0
    link: HostLink | None = None
    remote_events_address: str = ""
    life_sign: LifeSignHandle | None = None
    log: LogStyle = LogStyle()

    @property
    def rank(self) -> int:
        return self.handle.rank

    @property
    def process(self) -> int:
        """Counts over ranks and processes, as in `TransferEvent`."""
        return self.rank * self.transfer.num_processes + self.index

    @property
    def fixed_port(self) -> int:
        """Returns the port to listen on (producer); 0: any will do."""
        return self.transfer.port + self.process if self.transfer.port else 0

    @property
    def commands_address(self) -> str:
        """The scheduler half tells this process here what to do, on the same host."""
        return ipc_address(self.engine_id, f"kv-commands-{self.process}-{self.generation}")

    @property
    def events_address(self) -> str:
        """All transfer processes of the engine report here."""
        if self.link is not None:
            return self.remote_events_address
        return local_events_address(self.engine_id)


def local_events_address(engine_id: str) -> str:
    """Returns the address for transfer processes on the engine core's host."""
    return ipc_address(engine_id, "kv-events")
