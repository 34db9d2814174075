"""Reads where nodes are from how an operator writes it down."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from edge.address import join_address, split_address
from router.errors import ConfigurationError


class NodeSource(StrEnum):
    """Says what an entry of a node list stands for, and how it is written."""

    STATIC = ""
    DNS = "dns://"
    KUBERNETES = "k8s://"


class NodeRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Says where a node is: `target` is where requests go (prefill: gRPC, decode: HTTP),
    `status_target` where `NodeStatus` is served. Both are `host:port`."""

    role: NodeRole
    target: str
    status_target: str

    def __str__(self) -> str:
        return self.target

    def in_role(self, role: NodeRole, http_port: int) -> NodeAddress:
        """Returns where the same node is in a role, if it changes its own: its gRPC port serves
        prefill as well as status, `http_port` is that of its API."""
        if role is self.role:
            return self
        host, _ = split_address(self.status_target)
        serves_grpc = role is NodeRole.PREFILL
        target = self.status_target if serves_grpc else join_address(host, http_port)
        return NodeAddress(role, target, self.status_target)


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """Is one entry of a node list. `host` is the host of a static node, a DNS name with a node at
    each of its addresses, or a Kubernetes service (`service` or `service.namespace`)."""

    role: NodeRole
    host: str
    port: int
    status_port: int
    source: NodeSource

    def address(self, host: str | None = None) -> NodeAddress:
        """Returns the node of this entry at `host`, or at the entry's own host."""
        place = self.host if host is None else host
        return NodeAddress(
            self.role, join_address(place, self.port), join_address(place, self.status_port)
        )


def parse_node_list(role: NodeRole, text: str) -> tuple[NodeEntry, ...]:
    """Reads `host:port[/grpc_port],dns://name:port[/grpc_port],k8s://service:port[/grpc_port],…`.

    Raises:
        ConfigurationError: names the entry that cannot be read, and what is expected.
    """
    parts = [part.strip() for part in text.split(",")]
    entries = tuple(parse_node_entry(role, part) for part in parts if part)
    counts = Counter(entries)
    if len(counts) < len(entries):
        [(entry, _)] = counts.most_common(1)
        raise ConfigurationError(f"--{role} lists {entry.address()} twice.")
    return entries


def parse_node_entry(role: NodeRole, text: str) -> NodeEntry:
    dynamic = (NodeSource.DNS, NodeSource.KUBERNETES)
    source = next((s for s in dynamic if text.startswith(s)), NodeSource.STATIC)
    location, _, status_port = text.removeprefix(source).partition("/")
    host, separator, port = location.rpartition(":")
    if not separator or not host.strip("[]") or (role is NodeRole.DECODE and not status_port):
        raise _cannot_read(role, text)
    return NodeEntry(
        role=role,
        host=host.removeprefix("[").removesuffix("]"),
        port=_port(role, text, port),
        status_port=_port(role, text, status_port or port),
        source=source,
    )


def _port(role: NodeRole, text: str, digits: str) -> int:
    if not (digits.isascii() and digits.isdigit() and 0 < int(digits) < 65536):
        raise _cannot_read(role, text)
    return int(digits)


def _cannot_read(role: NodeRole, text: str) -> ConfigurationError:
    form = "host:port" if role is NodeRole.PREFILL else "host:http_port/grpc_port"
    return ConfigurationError(
        f"--{role}: cannot read {text!r}. Write each node as {form}, dns://name… for a name with "
        f"one node at each of its addresses, or k8s://service… for a Kubernetes service; separate "
        f"nodes by commas."
    )
