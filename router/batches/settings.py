"""How much is kept of files and batches, how long, and how much runs at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds files and batches.

    Attributes:
        max_file_bytes: Of one file.
        max_line_bytes: Of one line: what nodes take of a body, and a little more.
        max_requests: Lines of one batch.
        max_bytes_per_tenant: Of all its files; 0: any.
        max_batches_per_tenant: Batches of one tenant that have not ended.
        ttl_s: From the end of a file's writing, and of a batch's window.
        lease_s: Silence of a router after which its batches are another one's.
        max_concurrent: Requests of batches that one router has at nodes.
        max_batches: Batches that one router works on.
    """

    max_file_bytes: int = 512 << 20
    max_line_bytes: int = 8 << 20
    max_requests: int = 100_000
    max_bytes_per_tenant: int = 10 << 30
    max_batches_per_tenant: int = 100
    ttl_s: float = 30 * 86400.0
    lease_s: float = 30.0
    max_concurrent: int = 256
    max_batches: int = 32
