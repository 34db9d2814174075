"""Says how kernels of the gated delta rule are launched."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM: dict[str, int] = {"num_warps": 4, "maxnreg": 128}
"""Launch of what solves the system of a chunk: four programs share an SM. 230 us a layer of 8192
tokens on an H200, 240 with all registers, 330 with eight warps."""
FACTORS: dict[str, int] = {"num_warps": 4}
"""Launch of what multiplies by the solution: 71 us."""
CHANNEL_PARTS: dict[str, int] = {"num_warps": 1}
CHANNEL_SYSTEM: dict[str, int] = {"num_warps": 4}
"""The same where each channel decays by itself: 432 us for parts of 16 tokens (462 where one more
program shares an SM), and 284 for what is made of them (297 with 168 registers, 384 with 128)."""


@dataclass(frozen=True, slots=True)
class DeltaTuning:
    """How one kernel is launched.

    Attributes:
        values: Columns of a state in one program.
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
_LARGEST_KEY_AHEAD = 128
"""A chunk takes 60 KB with keys of this width, and 108 with keys of twice that."""


def decode_tuning(num_reqs: int) -> DeltaTuning:
    """Returns that of tokens one by one. Measured on an H200: 73 in place of 83 us a layer of 64
    requests, 281 in place of 333 of 256, against one choice for all."""
    return FIXED if num_reqs < _MANY_REQUESTS else DeltaTuning(values=64, num_warps=2)


def walk_tuning(itemsize: int, block_key: int, *, is_hopper: bool) -> DeltaTuning:
    """Returns that of the walk through a prompt's chunks, for numbers of `itemsize` bytes and keys
    of `block_key`: what the chunks behind it read is loaded ahead, where they have room beside each
    other. Measured on an H200 with keys of 128: a layer of 8192 tokens takes 210 us, 283 with two
    stages; 276 with 64 columns."""
    ahead = 3 if is_hopper else 2
    has_room = itemsize == 2 and block_key <= _LARGEST_KEY_AHEAD
    return DeltaTuning(values=32, num_warps=4, num_stages=ahead if has_room else 1)
