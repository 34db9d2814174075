"""Says who a request belongs to, and what that one may use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """Orders classes of service; a lower number goes first. `IDLE` is of requests that only use
    what no other request does, and are refused otherwise: clients cannot ask for it."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2
    IDLE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Is one customer of this router, as the key file describes it.

    Attributes:
        name: Unique, printable; a label of metrics.
        requests_per_s: Requests in the long run; 0 does not limit them.
        tokens_per_s: Prompt tokens plus `max_tokens` in the long run; 0 does not limit them.
        priority: The best class its requests may ask for, and the one they get unasked.
        is_operator: Its requests may name the node that serves them (`edge.http.headers.ENDPOINT`).
        salt: Secret bytes that go into every key made of its prompts, so that no other tenant can
            reach its cached KV or guess where its sessions live. Empty: shares with all whose
            salt is empty.
    """

    name: str = "default"
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    priority: Priority = Priority.STANDARD
    is_operator: bool = False
    salt: bytes = b""


ANYONE = Tenant()
"""The tenant of all requests when no keys are set up."""
