"""Carries the calls to a producer's transfer process: one interface, the choice is a setting.

On the wire all speak gRPC, so either kind of puller can call either kind of server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from edge.security.config import Role
from kv_transfer.config import KVTransferConfig


def pull_callers(config: KVTransferConfig) -> frozenset[Role]:
    """Returns the roles that may shake hands with us and take KV."""
    callers = {Role.DECODE} if config.kv_role == "kv_producer" else set[Role]()
    return frozenset(callers | ({Role.PREFILL} if config.shares_prefixes else set()))


class PullServer(ABC):
    """Listens on one address, for nodes of some roles alone."""

    @abstractmethod
    async def listen(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError when it cannot be had, `PlaintextRefused` when others
        could read along; port 0 is any."""

    @abstractmethod
    async def close(self) -> None:
        """Calls in motion are cancelled."""
