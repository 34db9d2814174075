"""Says which memory `xxh3` hashes; without Triton."""

from __future__ import annotations

_SHORT_BYTES = 240
"""Up to this many, the hash is computed in another way."""
_MOST_BYTES = 1 << 30
WORD_BYTES = 8


def is_hashed_on_gpu(num_bytes: int) -> bool:
    """Returns whether `xxh3.xxh3_128` takes a part of this size."""
    return _SHORT_BYTES < num_bytes <= _MOST_BYTES and num_bytes % WORD_BYTES == 0
