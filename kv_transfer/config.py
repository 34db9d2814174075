"""Settings of the KV data plane of one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edge.security.config import SecurityConfig

KVRole = Literal["kv_producer", "kv_consumer"]
PullTransportName = Literal["h2", "grpcio"]
KVTransportName = Literal["auto", "grpc", "cuda_ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """One node's side of the data plane.

    Attributes:
        kv_role: `kv_producer` on prefill nodes, `kv_consumer` on decode nodes.
        hosts: Addresses of this host, one for each network interface that carries KV. Transfer
            processes share them out: a producer's listens on its own and is reached there, a
            consumer's connects from its own if there are several.
        port: Of a producer's first transfer process; those of all ranks follow. 0: any free ones.
        security: How transfer processes make sure of those of peers.
        num_processes: Transfer processes for each tensor-parallel rank.
        num_streams: PullKV calls for each (request, rank of the peer); a consumer's choice.
        chunk_bytes: Payload of one wire chunk, about.
        staging_bytes: Host memory for KV on its way, of each rank. Its transfer processes have
            equal parts, as they have equal parts of every prompt.
        lease_s: Staged KV is dropped when nobody pulls it for this long.
        stall_timeout_s: A pull that makes no progress for this long fails.
        frozen_after_s: A transfer process that gives no sign of life for this long is killed and
            started again; its transfers fail.
        transport: How KV gets from one node to the other. `grpc`: over the network. `cuda_ipc`:
            where both nodes are on one host, decode copies it out of the prefill node's cache
            itself, from GPU to GPU; elsewhere over the network. `auto`: as `cuda_ipc` for caches
            on GPUs, as `grpc` for those on CPU. Both nodes must allow it.
        pull_transport: What a producer serves with, or a consumer receives with, over the network.
            `h2`: HTTP/2 ends of our own, which copy much less. `grpcio`: that library. The wire is
            gRPC with both, so the two nodes need not agree.
    """

    kv_role: KVRole
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 0
    security: SecurityConfig = field(default_factory=SecurityConfig)
    num_processes: int = 1
    num_streams: int = 4
    chunk_bytes: int = 2 << 20
    staging_bytes: int = 512 << 20
    lease_s: float = 30.0
    stall_timeout_s: float = 5.0
    frozen_after_s: float = 3.0
    transport: KVTransportName = "auto"
    pull_transport: PullTransportName = "h2"

    @property
    def process_staging_bytes(self) -> int:
        """Of one transfer process."""
        return self.staging_bytes // self.num_processes

    def shares_memory(self, on_gpu: bool) -> bool:
        """Whether a peer on this host may map, or is to be mapped by, a cache of this node."""
        return self.transport == "cuda_ipc" or (self.transport == "auto" and on_gpu)
