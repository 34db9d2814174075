"""Settings of the KV data plane of one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edge.security.config import SecurityConfig, SecurityError

KVRole = Literal["kv_producer", "kv_consumer"]
PullTransportName = Literal["h2", "grpcio"]
TransportName = Literal["nixl", "cuda_ipc", "stream"]

AUTO = "auto"
FASTEST = "fastest"
_CHOSEN_BY_DEVICE = (AUTO, FASTEST)
TRANSPORTS: tuple[TransportName, ...] = ("nixl", "cuda_ipc", "stream")
_FOR_GPU: tuple[TransportName, ...] = ("cuda_ipc", "stream")
_FOR_CPU: tuple[TransportName, ...] = ("stream",)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """One node's side of the data plane.

    Attributes:
        kv_role: `kv_producer` on prefill nodes, `kv_consumer` on decode nodes.
        shares_prefixes: Cached blocks move besides, by hash: a prefill node pulls those that it
            lacks, and serves its own; a decode node serves those of its answers.
        pulls_always: Prefill: prefixes are pulled even where to compute them would be quicker.
        offer_answers_s: Decode: how long an answer's blocks are offered after their last use, as
            long as they are cached.
        hosts: Addresses of this host, one for each network interface that carries KV. Transfer
            processes share them out: a producer's listens on its own and is reached there, a
            consumer's connects from its own if there are several.
        named_hosts: What `hosts` were looked up from, if any of it was a name (`interface:eth1`):
            ranks on other hosts look it up there. Empty: they use the address of their host.
        advertised_hosts: Addresses by which peers reach those of `hosts`, in their order, behind a
            mapping of ports. Empty: the same.
        network_status: File by which names of networks are looked up.
        port: Of a producer's first transfer process; those of all ranks follow. 0: any free ones.
        security: How transfer processes make sure of those of peers.
        num_processes: Transfer processes for each tensor-parallel rank.
        num_streams: PullKV calls for each (request, rank of the peer) over the network; a
            consumer's choice. On one host each pair of processes needs one.
        receive_threads: Threads of each of a consumer's transfer processes that read from the
            network and check what comes, over `h2`. 0: its event loop does.
        chunk_bytes: Payload of one wire chunk, about.
        staging_bytes: Host memory for KV on its way, of each rank. Its transfer processes have
            equal parts, as they have equal parts of every prompt.
        nixl_window_bytes: Memory of each rank's device for KV that moves through NIXL; its transfer
            processes have equal parts, for each direction. None is taken where nixl is not among
            the transports.
        host_tier_bytes: Host memory of each rank for KV blocks that left the cache. 0: none.
        host_tier_path: Folder of a memory file system for it, which then outlives the node. Empty:
            it is memory of the transfer processes.
        disk_tier_bytes: Space of each rank for blocks that the host tier had to forget. 0: none.
        disk_tier_path: Folder for them.
        store_tier_url: A store behind them (`kv_transfer.memory.pool.store_address`). Empty: none.
        lease_s: Staged KV is dropped when nothing pulls it for this long, and 20 times as long
            after all of it was computed, pulled or not.
        stall_timeout_s: A pull that makes no progress for this long fails.
        frozen_after_s: A transfer process that gives no sign of life for this long is killed and
            started again; its transfers fail.
        transports: How KV gets from one node to the other, in order of preference, comma separated;
            a pull takes the first that both nodes have and that works between them. `cuda_ipc`:
            where both nodes are on one host, decode copies it out of the prefill node's cache
            itself, from GPU to GPU. `nixl`: the prefill node copies it into memory that decode
            reads through NIXL and UCX, by RDMA where there is any, without encryption. `stream`:
            over the network; the last, and always there. `auto`: `cuda_ipc` and `stream` for caches
            on GPUs, `stream` for those on CPU. `fastest`: the same, and on hosts with RDMA `nixl`
            before `stream` for peers that it reads faster, if it is installed and there is no TLS.
        pull_transport: What a producer serves with, or a consumer receives with, over the network.
            `h2`: HTTP/2 ends of our own, which copy much less. `grpcio`: that library. The wire is
            gRPC with both, so the two nodes need not agree.
    """

    kv_role: KVRole
    shares_prefixes: bool = False
    pulls_always: bool = False
    offer_answers_s: float = 600.0
    hosts: tuple[str, ...] = ("127.0.0.1",)
    named_hosts: tuple[str, ...] = ()
    advertised_hosts: tuple[str, ...] = ()
    network_status: str = ""
    port: int = 0
    security: SecurityConfig = field(default_factory=SecurityConfig)
    num_processes: int = 1
    num_streams: int = 4
    receive_threads: int = 0
    chunk_bytes: int = 2 << 20
    staging_bytes: int = 512 << 20
    nixl_window_bytes: int = 256 << 20
    host_tier_bytes: int = 0
    host_tier_path: str = ""
    disk_tier_bytes: int = 0
    disk_tier_path: str = ""
    store_tier_url: str = ""
    lease_s: float = 30.0
    stall_timeout_s: float = 5.0
    frozen_after_s: float = 3.0
    transports: str = AUTO
    pull_transport: PullTransportName = "h2"

    def __post_init__(self) -> None:
        """Raises `SecurityError` for a server that cannot do what security asks of it."""
        serves_by_grpcio = self.sends and self.pull_transport == "grpcio"
        if serves_by_grpcio and self.security.accept_missing_tls:
            raise SecurityError(
                "grpcio's server cannot serve with and without TLS on one port: while "
                "--accept-missing-tls is set, --kv-pull-transport must be h2"
            )
        if self.security.has_tls and self.names_nixl:
            raise SecurityError(
                "NIXL moves KV in the clear and asks for no certificate: leave nixl out of "
                "--kv-transports, or TLS away where the network between the nodes is closed"
            )

    @property
    def sends(self) -> bool:
        """Returns whether peers pull KV from this node."""
        return self.kv_role == "kv_producer" or self.shares_prefixes

    @property
    def receives(self) -> bool:
        """Returns whether this node pulls KV from peers."""
        return self.kv_role == "kv_consumer" or self.shares_prefixes

    @property
    def names_nixl(self) -> bool:
        """Returns whether nixl is among the transports."""
        return "nixl" in [name.strip() for name in self.transports.split(",")]

    def num_host_slots(self, block_bytes: int) -> int:
        """Returns the blocks of this many bytes that the host tier of a rank holds."""
        return self.host_tier_bytes // block_bytes

    def num_disk_blocks(self, block_bytes: int) -> int:
        """Returns the blocks of this many bytes that the disk tier of a rank holds."""
        return self.disk_tier_bytes // block_bytes

    @property
    def process_staging_bytes(self) -> int:
        """Returns the share of one transfer process, for each direction in which KV moves."""
        return self.staging_bytes // self.num_processes // (self.sends + self.receives)

    @property
    def process_window_bytes(self) -> int:
        """Returns the share of one transfer process, for each direction in which KV moves."""
        return self.nixl_window_bytes // self.num_processes // (self.sends + self.receives)

    def transports_for(self, on_gpu: bool) -> tuple[TransportName, ...]:
        """Returns the transports for a cache on such a device, in order of preference."""
        if self.transports in _CHOSEN_BY_DEVICE:
            return _FOR_GPU if on_gpu else _FOR_CPU
        return parse_transports(self.transports)


def parse_transports(text: str) -> tuple[TransportName, ...]:
    """Raises ValueError unless `text` is `auto` or `fastest`, or lists transports with `stream` at
    the end."""
    names = [part.strip() for part in text.split(",")]
    found = tuple(known for name in names for known in TRANSPORTS if name == known)
    if text in _CHOSEN_BY_DEVICE:
        return _FOR_GPU
    if len(found) != len(names) or len(set(found)) != len(found):
        raise ValueError(
            f"{text!r}: name each of {', '.join(TRANSPORTS)} once at most, or say auto or fastest"
        )
    if found[-1] != "stream":
        raise ValueError(f"{text!r}: the last transport is stream, which works with every peer")
    return found
