"""Names of transfers: 32 lower-case hex digits, drawn by the decode node for each request."""

from __future__ import annotations

import re

_TRANSFER_ID = re.compile(r"[0-9a-f]{32}")


def is_transfer_id(text: str) -> bool:
    """Returns whether `text` can name a transfer: 32 lower-case hex digits."""
    return _TRANSFER_ID.fullmatch(text) is not None


def group_of_transfer(transfer_id: str, num_groups: int) -> int:
    """Returns the group of a transfer where one side is of a release that cannot tell the other."""
    return int(transfer_id[:8], 16) % num_groups if num_groups > 1 else 0
