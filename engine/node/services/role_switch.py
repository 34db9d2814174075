"""The request that a node change its role: from prefill to decode, or back.

serving ── `ask` ──▶ draining ── its requests have ended, or the time is up ──▶ the engine switches
   │                                                                             │
   └─ refused: nothing changes                  a new node of the other tier ◀───┘

A switch belongs to one life of a node in one role. The runner of the node waits for `requested` and
makes the next life; a node that dies in between starts in the role that its command line names.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.contracts.errors import RoleSwitchRefused
from tandem_pb import node_pb2

NAMES: dict[node_pb2.NodeRole, str] = {
    node_pb2.NODE_ROLE_PREFILL: "prefill",
    node_pb2.NODE_ROLE_DECODE: "decode",
}


@dataclass(frozen=True, slots=True)
class RoleRequest:
    """Says what the node shall be, and the seconds for what it has begun."""

    role: node_pb2.NodeRole
    drain_timeout_s: float


class RoleSwitch:
    """Takes the request of one life of a node. `drain_timeout_s`: the longest that it may take;
    `http_port`: of the API while it is a decode node; `obstacle`: says why the node could not be
    the other one just now, empty if it could."""

    def __init__(
        self,
        role: node_pb2.NodeRole,
        drain_timeout_s: float = 0.0,
        http_port: int = 0,
        obstacle: Callable[[], str] = lambda: "",
    ) -> None:
        self.role = role
        self.http_port = http_port
        self.request: RoleRequest | None = None
        self._drain_timeout_s = drain_timeout_s
        self._obstacle = obstacle
        self._requested = asyncio.Event()

    def ask(self, role: node_pb2.NodeRole, drain_timeout_s: float = 0.0) -> None:
        """Asks for another role. `drain_timeout_s` 0: as long as settings allow. Raises
        `RoleSwitchRefused`."""
        if role not in NAMES:
            raise RoleSwitchRefused("say which role the node shall have: prefill or decode")
        if not self.http_port:
            raise RoleSwitchRefused(
                f"this node is a {NAMES[self.role]} node for good: only one that was started by "
                "`tandem node` changes its role"
            )
        if self.request is not None:
            raise RoleSwitchRefused(
                f"this node changes its role already: it will be a {NAMES[self.request.role]} node"
            )
        if role == self.role:
            raise RoleSwitchRefused(f"this node is a {NAMES[role]} node already")
        if not math.isfinite(drain_timeout_s) or drain_timeout_s < 0:
            raise RoleSwitchRefused("the seconds for draining must be a number from 0 on")
        if obstacle := self._obstacle():
            raise RoleSwitchRefused(obstacle)
        limit = self._drain_timeout_s
        self.request = RoleRequest(role, min(drain_timeout_s, limit) if drain_timeout_s else limit)
        self._requested.set()

    async def requested(self) -> RoleRequest:
        """Returns the request once there is one."""
        await self._requested.wait()
        assert self.request is not None
        return self.request
