"""Makes a chain of block hashes of a prompt's text: equal chains, equal beginnings.

The router has no tokens, so a block is a piece of the JSON text. Each hash depends on all before
it. A conversation's later turn repeats the text of the earlier one and adds to it, so its chain
begins with the earlier chain. The last, incomplete block is left out: it will look different in
the next turn.
"""

from __future__ import annotations

import xxhash

BLOCK_BYTES = 4096
"""About 1024 tokens of English text."""
_MAX_BLOCKS = 512
MOST_BYTES = _MAX_BLOCKS * BLOCK_BYTES
"""Text behind this many changes no block."""


def hash_blocks(text: bytes, seed: int) -> tuple[int, ...]:
    """Returns 64 bits for each complete block. `seed` is what else must agree: tenant, model."""
    chain = []
    end = min(len(text) - len(text) % BLOCK_BYTES, MOST_BYTES)
    for start in range(0, end, BLOCK_BYTES):
        seed = xxhash.xxh3_64_intdigest(text[start : start + BLOCK_BYTES], seed)
        chain.append(seed)
    return tuple(chain)
