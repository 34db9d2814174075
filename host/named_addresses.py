"""Addresses of this host by what an operator knows of them: an interface's name, or a network's.

    10.0.0.5                    stays as it is
    interface:eth1              the address of that interface; `interface:net*` of each that fits
    network:fabric/rail0        those that Multus gave the pod there, by the annotation
                                k8s.v1.cni.cncf.io/network-status, which a file holds

The kubelet may write the annotation's file a moment after the container has started, so that an
empty one is waited for.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from host.network import interfaces_by_address

INTERFACE = "interface:"
NETWORK = "network:"
NETWORK_STATUS_FILE = Path("/etc/tandem/pod/network-status")
"""The Helm chart mounts the annotation there."""
_WAIT_S = 120.0
"""Kubelets write files of the downward API anew every minute, or when the pod changes."""
_POLL_S = 0.2

ListInterfaces = Callable[[], Mapping[str, str]]


class NoSuchAddress(ValueError):
    """No address of this host fits. The message says what there is instead."""


def is_named(host: str) -> bool:
    """Returns whether `host` is looked up on the host that uses it."""
    return host.startswith((INTERFACE, NETWORK))


class NamedAddresses:
    """Looks names up on this host.

    `family`: 4 or 6, which is taken where an interface has addresses of both. `wait_s`: how long an
    empty `status_file` is waited for.
    """

    def __init__(
        self,
        family: int = 4,
        *,
        interfaces: ListInterfaces = interfaces_by_address,
        status_file: Path = NETWORK_STATUS_FILE,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._family = family
        self._interfaces = interfaces
        self._status_file = status_file
        self._wait_s = wait_s

    def resolve(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Returns the addresses, in the order of `hosts`, none twice. Raises `NoSuchAddress`."""
        found: dict[str, None] = {}
        for host in hosts:
            if host.startswith(INTERFACE):
                found |= dict.fromkeys(self._of_interfaces(host.removeprefix(INTERFACE)))
            elif host.startswith(NETWORK):
                found |= dict.fromkeys(self._of_networks(host.removeprefix(NETWORK)))
            else:
                found[host] = None
        return tuple(found)

    def _of_interfaces(self, pattern: str) -> list[str]:
        """Returns one address for each interface that fits, in the order of their names."""
        addresses: dict[str, list[str]] = {}
        for address, name in self._interfaces().items():
            if not ipaddress.ip_address(address).is_loopback:
                addresses.setdefault(name, []).append(address)
        chosen = {name: self._choose(addresses[name]) for name in sorted(addresses)}
        found = [one for name, one in chosen.items() if one and fnmatch.fnmatchcase(name, pattern)]
        if not found:
            there = ", ".join(f"{name} ({one})" for name, one in chosen.items() if one)
            raise NoSuchAddress(
                f"no network interface called {pattern} has an address that others reach; this "
                f"host has {there or 'none'}"
            )
        return found

    def _of_networks(self, pattern: str) -> list[str]:
        networks = self._networks()
        found = [
            address
            for network in networks
            if fnmatch.fnmatchcase(str(network.get("name", "")), pattern)
            and (address := self._choose(network.get("ips") or []))
        ]
        if not found:
            there = ", ".join(str(network.get("name")) for network in networks)
            raise NoSuchAddress(
                f"the pod has no address in a network called {pattern}; {self._status_file} names "
                f"{there or 'none'}: is the pod annotated with k8s.v1.cni.cncf.io/networks?"
            )
        return found

    def _networks(self) -> list[dict[str, Any]]:
        """Returns what Multus tells, as soon as it is there."""
        deadline = time.monotonic() + self._wait_s
        while not (text := self._status_text()):
            if time.monotonic() >= deadline:
                raise NoSuchAddress(
                    f"{self._status_file} is empty or missing after {self._wait_s:g} s: Multus "
                    f"writes the annotation k8s.v1.cni.cncf.io/network-status, which must be "
                    f"mounted there by the downward API"
                )
            time.sleep(_POLL_S)
        try:
            networks = json.loads(text)
        except ValueError as error:
            raise NoSuchAddress(f"{self._status_file} is not JSON: {error}") from None
        if not isinstance(networks, list) or not all(isinstance(one, dict) for one in networks):
            raise NoSuchAddress(f"{self._status_file} is not a list of networks")
        return networks

    def _status_text(self) -> str:
        try:
            return self._status_file.read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def _choose(self, addresses: Sequence[str]) -> str:
        """Returns the first address of more than a link, of our family if there is one; else an
        empty text."""
        reached = [one for one in map(_address, addresses) if one is not None]
        own = [one for one in reached if one.version == self._family]
        return str((own or reached)[0]) if reached else ""


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns None for what is no address, or reaches no further than its link."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if address.is_link_local else address
