"""The addresses of one cluster: a range of loopback's own, 127.x.0.0/16.

    127.x.0.1 …      Services          127.x.0.250   DNS
    127.x.1.1 …      pods, none twice

A range is claimed by a socket that stays open, so that clusters of several test runs on one
machine keep out of each other's way; the kernel gives it back however the run ends.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Iterator

_CLAIM_PORT = 49_150
_RANGES = range(64, 250)


class Network:
    """Gives addresses. `prefix`: 127.x. Of a hollow cluster, which listens nowhere, any will do."""

    def __init__(self, prefix: str = "127.64") -> None:
        self.prefix = prefix
        self._pods = (f"{prefix}.{i}.{j}" for i, j in itertools.product(range(1, 250), repeat=2))

    @classmethod
    @contextlib.contextmanager
    def claim(cls) -> Iterator[Network]:
        for number in random.sample(_RANGES, len(_RANGES)):
            with socket.socket() as claim:
                try:
                    claim.bind((f"127.{number}.0.254", _CLAIM_PORT))
                except OSError:
                    continue
                yield cls(f"127.{number}")
                return
        raise RuntimeError("every range of loopback addresses is in use")

    @property
    def dns(self) -> str:
        return f"{self.prefix}.0.250"

    def next_pod(self) -> str:
        return next(self._pods)

    def free_service(self, taken: set[str]) -> str:
        addresses = (f"{self.prefix}.0.{i}" for i in range(1, 250))
        return next(address for address in addresses if address not in taken)
