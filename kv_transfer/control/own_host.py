"""Which of the node's addresses a transfer process uses.

Processes share out the node's network interfaces: those of a GPU that is nearer to some of them
take these in turn, else all processes of all ranks take all in turn. Both sides count alike, so
with equally many processes and addresses the first of one side talks to the first of the other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from edge.address import join_address
from host.named_addresses import NamedAddresses
from host.network import Network
from kv_transfer.control.process_config import TransferProcessConfig
from kv_transfer.errors import KVTransferError


def own_host(config: TransferProcessConfig, gpu: str, network: Network | None = None) -> str:
    """Returns the address of this host that the process shall use.

    `gpu`: PCI address of the GPU that holds the rank's cache; empty for none.

    Raises:
        NoSuchAddress: On a host of a node that spans several, the name has no address here.
    """
    hosts = _hosts(config)
    if len(hosts) == 1:
        return hosts[0]
    nearest = (network or Network()).nearest(hosts, gpu)
    number = config.index if len(nearest) < len(hosts) else config.process
    return nearest[number % len(nearest)]


def advertised_host(config: TransferProcessConfig, host: str) -> str:
    """Returns the address by which peers reach `host`, which is one of this process's hosts."""
    advertised = config.transfer.advertised_hosts
    return advertised[_hosts(config).index(host)] if advertised else host


def check_own(hosts: Sequence[str]) -> None:
    """Raises `KVTransferError` for an address at which this host cannot listen."""
    for host in hosts:
        try:
            info = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(info[0], info[1]) as probe:
                probe.bind(info[4])
        except OSError as error:
            raise KVTransferError(
                f"KV cannot be served at {host}, which is no address of this host "
                f"({error.strerror}): name one of its own with --kv-host, and the one by which "
                f"others reach it with --kv-advertise-host"
            ) from error


def cannot_listen(host: str, port: int, error: OSError) -> KVTransferError:
    """Says that KV cannot be served there, and what else may be named. `port` 0: any."""
    # Names that are not found have numbers of their own, below 0.
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return KVTransferError(
        f"KV cannot be served at {join_address(host, port)} ({why}): "
        "choose another --kv-port or --kv-host"
    )


def _hosts(config: TransferProcessConfig) -> tuple[str, ...]:
    """Returns the addresses; names are still there on other hosts than the engine core's."""
    transfer = config.transfer
    family = 6 if config.link is not None and ":" in config.link.host_address else 4
    return NamedAddresses(family, status_file=Path(transfer.network_status)).resolve(transfer.hosts)


def source_host(config: TransferProcessConfig, gpu: str) -> str:
    """Returns the address that a consumer's connections leave from; empty: as the kernel sees fit.

    Raises:
        OSError: It is no address of this host.
    """
    if len(_hosts(config)) == 1:
        return ""
    host = own_host(config, gpu)
    info = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(info[0], info[1]) as probe:
        probe.bind(info[4])
    return host
