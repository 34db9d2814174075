"""Hashes of memory on a device equal the library's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from tandem_kernels.checksums.xxh3 import xxh3_128


def hashes_are_the_librarys(sizes: Sequence[int], device: str = "cpu") -> None:
    """Parts of these many bytes lie one behind the other, and are hashed in one call."""
    memory = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device=device)
    parts = list(memory.split(list(sizes)))
    expected = [xxhash.xxh3_128_digest(part.cpu().numpy()) for part in parts]
    assert xxh3_128(parts) == expected
