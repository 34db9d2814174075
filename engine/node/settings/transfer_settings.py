"""Settings of how KV gets from a prefill to a decode node, and what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from edge.command_line import SettingsError
from edge.security.config import SecurityConfig
from edge.security.settings import SecuritySettings
from engine.config import EngineConfig
from host.named_addresses import NETWORK_STATUS_FILE, NamedAddresses, NoSuchAddress, is_named
from kv_transfer.config import KVRole, KVTransferConfig, PullTransportName, parse_transports
from kv_transfer.control.sizing import (
    available_cores,
    choose_num_streams,
    choose_receive_threads,
    fewest_staging_bytes,
    processes_for_this_host,
)
from kv_transfer.memory.pool.store_address import StoreAddress
from kv_transfer.wire.chunk_grid import MAX_CHUNK_BYTES

_MAX_PORT = 65535
_EVERY_ADDRESS = ("0.0.0.0", "::", "[::]")


def _checked_transports(text: str) -> str:
    parse_transports(text)
    return text


class TransferSettings(SecuritySettings):
    """See docs/architecture.md."""

    kv_host: str | None = Field(
        default=None,
        description="Address of this host at which decode nodes fetch KV from a prefill node. "
        "Several, comma separated, use one network interface each: transfer processes share them, "
        "those nearest to their GPU first, and decode nodes connect from their own. "
        "interface:eth1 is that interface's address, interface:net* those of each that fits; "
        "network:fabric/rail0 the pod's in that network of Multus, by --kv-network-status. "
        "Default: --host.",
    )
    kv_advertise_host: str = Field(
        default="",
        description="Address or name by which peers reach --kv-host, if that is another: behind a "
        "mapping of ports, or where --kv-host is every address (0.0.0.0). Several, comma "
        "separated, in the order of --kv-host. Ports are the same on both sides, so --kv-port "
        "has to be set. Default: --kv-host.",
    )
    kv_network_status: Path = Field(
        default=NETWORK_STATUS_FILE,
        description="File with the pod's annotation k8s.v1.cni.cncf.io/network-status, for "
        "--kv-host network:NAME.",
    )
    kv_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="First port at which decode nodes fetch KV from a prefill node. The "
        "--tensor-parallel-size times --kv-processes transfer processes take consecutive ports, "
        "one each. 0: any free ones.",
    )
    kv_transports: Annotated[str, AfterValidator(_checked_transports)] = Field(
        default="auto",
        description="Ways for KV to get from a prefill to a decode node, in order of preference, "
        "comma separated. cuda_ipc: if both are on one host, decode copies it from GPU to GPU. "
        "nixl: decode reads it through NIXL and UCX (RDMA, or NVLink on one host), in the clear; "
        "needs the extra nixl. stream: over the network; must be the last. auto: cuda_ipc,stream "
        "for KV on GPUs, else stream. fastest: the same, and on hosts with RDMA also nixl, for "
        "peers that it reads faster than the stream; not with TLS.",
    )
    kv_pull_transport: PullTransportName = Field(
        default="h2",
        description="Implementation that carries KV over the network. h2: our own HTTP/2 client "
        "and server, which copy much less. grpcio: the gRPC library. Both speak gRPC, so nodes "
        "need not agree.",
    )
    kv_processes: int | None = Field(
        default=None,
        ge=1,
        description="KV transfer processes of each worker. Default: 1 to 8, by this host's cores, "
        "network interfaces and workers.",
    )
    kv_streams: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Connections that pull one request's KV. Default: 4, or 2 for each of 3 or "
        "more processes.",
    )
    kv_chunk_bytes: int = Field(
        default=2 << 20,
        ge=4096,
        le=MAX_CHUNK_BYTES,
        description="Size of one chunk of KV on the wire.",
    )
    kv_staging_bytes: int = Field(
        default=512 << 20,
        ge=1 << 20,
        description="Host memory of each worker for KV in transit, divided equally among its "
        "transfer processes; pinned if KV is on a GPU. Each process needs at least 8 times "
        "--kv-chunk-bytes.",
    )
    kv_nixl_window_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="Memory of each worker's device, a GPU's if KV is there, for KV that moves "
        "through NIXL; divided equally among its transfer processes. Each needs at least "
        "--kv-chunk-bytes for each direction. Only taken if --kv-transports names or tries nixl.",
    )
    kv_host_memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Host memory of each worker for KV blocks that the cache had to forget; a "
        "prompt that needs them copies them back instead of computing them. Pinned if KV is on a "
        "GPU. 0: none.",
    )
    kv_share_prefixes: Literal["off", "auto", "always"] = Field(
        default="off",
        description="auto: cached KV moves between nodes, by the hash of its blocks. A prefill "
        "node fetches a prompt's prefix from the node that the router names, if by the rates it "
        "has seen that is quicker than to compute it, and gives its own; a decode node gives the "
        "KV of its answers, for the conversations' next turns. Half of --kv-staging-bytes is for "
        "each direction. always: even where to compute would be quicker, to measure it.",
    )
    kv_offer_answers_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds for which a decode node offers the KV of an answer, with "
        "--kv-share-prefixes and as long as its cache has it: at most half of its blocks, the "
        "longest unused and the ends of conversations first to go.",
    )
    kv_host_memory_path: Path | None = Field(
        default=None,
        description="Folder of a memory file system (a mounted tmpfs) for --kv-host-memory-bytes. "
        "KV there is found again when the node was killed and starts anew. Each node needs one of "
        "its own. Default: none; it is lost with the node.",
    )
    kv_disk_path: Path | None = Field(
        default=None,
        description="Folder on a local disk for KV blocks that host memory had to forget. What is "
        "there after a crash is used if its checksums are right. Each node needs one of its own.",
    )
    kv_disk_bytes: int = Field(
        default=0,
        ge=0,
        description="Space of each worker for KV blocks below --kv-disk-path. 0: none.",
    )
    kv_store: str = Field(
        default="",
        description="A store of KV behind host memory and disk, which all nodes of one model share "
        "and which outlives them: mooncake://HOST:PORT of a master of Mooncake Store, with "
        "?protocol=rdma, devices, metadata, replicas or connections. Needs "
        "--kv-host-memory-bytes and the extra store. Default: none.",
    )
    kv_lease_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds after which KV that was not fetched is dropped; while it is fetched, "
        "20 times as many behind its prompt's end.",
    )
    kv_stall_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds without progress after which a transfer has failed."
    )

    def kv_transfer_config(
        self, kv_role: KVRole, host: str, ranks: int, frozen_after_s: float, *, is_check: bool
    ) -> KVTransferConfig:
        """Returns the settings of the data plane of a node with this many ranks that listens on
        `host`.

        `is_check`: names of interfaces and networks stay as they are, since the node may run
        elsewhere.

        Raises:
            SettingsError: They do not fit together, or to this host.
            SecurityError: The port would be open to other hosts without TLS or a token.
        """
        wanted = tuple(one.strip() for one in (self.kv_host or host).split(","))
        hosts = wanted if is_check else self._looked_up(wanted, host)
        self._check_reachable(kv_role, hosts)
        addresses = [one for one in hosts if not is_named(one)]
        processes = self.kv_processes or processes_for_this_host(addresses, ranks)
        return KVTransferConfig(
            kv_role=kv_role,
            shares_prefixes=self.shares_prefixes,
            pulls_always=self.kv_share_prefixes == "always",
            offer_answers_s=self.kv_offer_answers_s,
            hosts=hosts,
            named_hosts=wanted if any(map(is_named, wanted)) else (),
            advertised_hosts=self._checked_advertised(hosts),
            network_status=str(self.kv_network_status),
            port=self._checked_port(processes, ranks),
            security=self._checked_security(kv_role, host, hosts),
            transports=self.kv_transports,
            num_processes=processes,
            num_streams=self.kv_streams or choose_num_streams(processes),
            receive_threads=choose_receive_threads(available_cores(), processes * ranks),
            chunk_bytes=self.kv_chunk_bytes,
            staging_bytes=self._checked_staging_bytes(processes),
            nixl_window_bytes=self._checked_window_bytes(processes),
            host_tier_bytes=self.kv_host_memory_bytes,
            host_tier_path=str(self.kv_host_memory_path or ""),
            disk_tier_bytes=self.kv_disk_bytes,
            disk_tier_path=str(self.kv_disk_path or ""),
            store_tier_url=self.kv_store,
            lease_s=self.kv_lease_s,
            stall_timeout_s=self.kv_stall_timeout_s,
            frozen_after_s=frozen_after_s,
            pull_transport=self.kv_pull_transport,
        )

    def check_tiers(self, caches_prefixes: bool) -> None:
        """Checks what is said of KV tiers and shared prefixes, whatever the model. Raises
        `SettingsError`."""
        size = self.kv_host_memory_bytes
        if bool(self.kv_disk_bytes) != (self.kv_disk_path is not None):
            raise SettingsError(
                "--kv-disk-path and --kv-disk-bytes belong together: the folder, and how much of it"
            )
        if not size and (self.kv_disk_bytes or self.kv_host_memory_path or self.kv_store):
            raise SettingsError(
                "--kv-disk-path, --kv-host-memory-path and --kv-store need "
                "--kv-host-memory-bytes: all KV that leaves the cache goes through host memory"
            )
        if self.kv_store:
            try:
                StoreAddress.parse(self.kv_store)
            except ValueError as error:
                raise SettingsError(f"--kv-store {self.kv_store}: {error}") from None
        for flag, is_on in (
            ("--kv-share-prefixes", self.shares_prefixes),
            ("--kv-host-memory-bytes", size > 0),
        ):
            if is_on and not caches_prefixes:
                raise SettingsError(
                    f"{flag} is for blocks that the prefix cache knows, which is off: turn it on "
                    "with --enable-prefix-caching (decode nodes begin without it)"
                )

    def check_host_tier(self, config: EngineConfig) -> None:
        """Checks that KV of this model can go to host memory and be found there again. Raises
        `SettingsError`."""
        size, layout = self.kv_host_memory_bytes, config.kv_layout
        if not size or config.kv_transfer is None:
            return
        if size < layout.block_bytes:
            raise SettingsError(
                f"--kv-host-memory-bytes {size} is less than one block of KV, which takes "
                f"{layout.block_bytes} bytes"
            )
        if 0 < self.kv_disk_bytes < layout.block_bytes:
            raise SettingsError(
                f"--kv-disk-bytes {self.kv_disk_bytes} is less than one block of KV, which takes "
                f"{layout.block_bytes} bytes"
            )

    def _looked_up(self, wanted: tuple[str, ...], host: str) -> tuple[str, ...]:
        family = 6 if ":" in host else 4
        try:
            return NamedAddresses(family, status_file=self.kv_network_status).resolve(wanted)
        except (NoSuchAddress, OSError) as error:
            raise SettingsError(f"--kv-host {self.kv_host}: {error}") from error

    def _check_reachable(self, kv_role: KVRole, hosts: tuple[str, ...]) -> None:
        for host in hosts:
            if self._sends(kv_role) and host in _EVERY_ADDRESS and not self.kv_advertise_host:
                raise SettingsError(
                    f"a node that listens on {host} does not know by which address others reach "
                    f"its KV; name one with --kv-host (or TANDEM_KV_HOST), or with "
                    f"--kv-advertise-host"
                )

    def _checked_advertised(self, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if not self.kv_advertise_host:
            return ()
        advertised = tuple(one.strip() for one in self.kv_advertise_host.split(","))
        if len(advertised) != len(hosts) or "" in advertised:
            raise SettingsError(
                f"--kv-advertise-host names {len(advertised)} addresses for the {len(hosts)} of "
                f"--kv-host; name one for each, in the same order"
            )
        if not self.kv_port:
            raise SettingsError(
                "--kv-advertise-host needs --kv-port: peers dial the port that is listened on"
            )
        return advertised

    def _checked_security(
        self, kv_role: KVRole, host: str, hosts: tuple[str, ...]
    ) -> SecurityConfig:
        config = self.security_config()
        config.check_plaintext("listening for other services", host)
        if self._sends(kv_role):
            for one in hosts:
                config.check_plaintext("listening for nodes that fetch KV", one)
        return config

    def _sends(self, kv_role: KVRole) -> bool:
        return kv_role == "kv_producer" or self.shares_prefixes

    @property
    def shares_prefixes(self) -> bool:
        """Returns whether cached KV moves between nodes."""
        return self.kv_share_prefixes != "off"

    def _checked_staging_bytes(self, processes: int) -> int:
        directions = 1 + self.shares_prefixes
        fewest = directions * fewest_staging_bytes(processes, self.kv_chunk_bytes)
        if self.kv_staging_bytes < fewest:
            raise SettingsError(
                f"{processes} transfer processes need at least {fewest} --kv-staging-bytes; give "
                f"that, or lower --kv-processes or --kv-chunk-bytes"
            )
        return self.kv_staging_bytes

    def _checked_window_bytes(self, processes: int) -> int:
        directions = 1 + self.shares_prefixes
        fewest = directions * processes * self.kv_chunk_bytes
        names_nixl = "nixl" in parse_transports(self.kv_transports)
        if names_nixl and self.kv_nixl_window_bytes < fewest:
            raise SettingsError(
                f"{processes} transfer processes need at least {fewest} --kv-nixl-window-bytes; "
                f"give that, or lower --kv-processes or --kv-chunk-bytes"
            )
        return self.kv_nixl_window_bytes

    def _checked_port(self, processes: int, ranks: int) -> int:
        last = self.kv_port + ranks * processes - 1
        if self.kv_port and last > _MAX_PORT:
            raise SettingsError(f"--kv-port {self.kv_port} needs ports up to {last}")
        return self.kv_port
