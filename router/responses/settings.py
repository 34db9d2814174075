"""How long and how much is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLimits:
    """Bounds what is kept: seconds, and bytes.

    Attributes:
        ttl_s: From the last use.
        max_bytes_per_tenant: 0: any.
        max_item_bytes: Of one item.
        max_body_bytes: Of a request with all that came before it: what nodes take.
        lease_s: Silence of a router after which its background responses are another one's.
        max_background: Responses in the background that one router works on.
    """

    ttl_s: float = 30 * 86400.0
    max_bytes_per_tenant: int = 1 << 30
    max_item_bytes: int = 4 << 20
    max_body_bytes: int = 8 << 20
    lease_s: float = 30.0
    max_background: int = 256
