"""Lists what is asked of every checkpoint. Apart from the reference, so that rank processes need
not import transformers.
"""

from __future__ import annotations

import torch

MAX_LEN = 192
VOCAB = 101
"""The size is not a multiple of 64: every shard of the vocabulary is padded."""
NUM_GREEDY = 64
_PREFIX = 40


def prompts() -> list[list[int]]:
    """Lengths around block boundaries of 16; the last two begin with the same `_PREFIX` tokens."""
    generator = torch.Generator().manual_seed(7)

    def some(length: int) -> list[int]:
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    prefix = some(_PREFIX)
    return [some(1), some(16), some(33), [*prefix, *some(31)], [*prefix, *some(8)]]
