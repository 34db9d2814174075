"""Says which memory `xxh3` hashes; without Triton."""

from __future__ import annotations

from torch import Tensor

_SHORT_BYTES = 240
"""Up to this many, the hash is computed in another way."""
_MOST_BYTES = 1 << 30
WORD_BYTES = 8


def is_hashed_on_gpu(part: Tensor) -> bool:
    """Returns whether `xxh3.xxh3_128` takes a part, by its size and place: it reads whole words."""
    has_words = part.nbytes % WORD_BYTES == part.data_ptr() % WORD_BYTES == 0
    return has_words and _SHORT_BYTES < part.nbytes <= _MOST_BYTES
