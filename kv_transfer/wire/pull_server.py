"""Carries the calls to a producer's transfer process: one interface, the choice is a setting.

On the wire all speak gRPC, so either kind of puller can call either kind of server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from edge.security.config import Role

CALLERS = frozenset({Role.DECODE})
"""Roles that may shake hands with us and take KV."""


class PullServer(ABC):
    """Listens on one address, for decode nodes alone."""

    @abstractmethod
    async def listen(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError when it cannot be had, `PlaintextRefused` when others
        could read along; port 0 is any."""

    @abstractmethod
    async def close(self) -> None:
        """Calls in motion are cancelled."""
