"""Says how kernels of the gated delta rule are launched."""

from __future__ import annotations

from dataclasses import dataclass

MOST_WARPS = 2
"""Four warps multiply together on Hopper, and what Triton 3.6 makes of these kernels then is wrong:
chunks of 64 tokens came out 80 % off, and some read where nothing is."""
CHUNK_WARPS = 2
"""Warps of a program that solves a chunk's system."""


@dataclass(frozen=True, slots=True)
class DeltaTuning:
    """How one kernel is launched.

    Attributes:
        values: Columns of a state in one program.
        num_warps: Where a kernel multiplies matrices, at most `MOST_WARPS`.
        fuses: Products are added without being rounded first. Of `a * b + c * d` the compiler
            chooses which one, differently in each kernel and loop.
    """

    values: int
    num_warps: int
    num_stages: int = 1
    fuses: bool = True


FIXED = DeltaTuning(values=32, num_warps=1, fuses=False)
"""That of tokens one by one where a row must have the same bits in any company."""
_MANY_REQUESTS = 32


def decode_tuning(num_reqs: int) -> DeltaTuning:
    """Returns that of tokens one by one. Measured on an H200: 73 in place of 83 us a layer of 64
    requests, 281 in place of 333 of 256, against one choice for all."""
    return FIXED if num_reqs < _MANY_REQUESTS else DeltaTuning(values=64, num_warps=2)


def walk_tuning(itemsize: int) -> DeltaTuning:
    """Returns that of the walk through a prompt's chunks of numbers of `itemsize` bytes: what the
    next chunk reads is loaded ahead, where two of them have room beside each other. Measured on an
    H200: a layer of 8192 tokens takes 0.97 ms, 1.11 with 32 columns, 1.28 with three stages."""
    return DeltaTuning(values=16, num_warps=MOST_WARPS, num_stages=2 if itemsize == 2 else 1)


def channel_walk_tuning() -> DeltaTuning:
    """Returns that of the walk where each channel decays by itself."""
    return DeltaTuning(values=32, num_warps=MOST_WARPS)
