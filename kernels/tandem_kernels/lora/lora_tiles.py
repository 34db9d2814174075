"""How the kernels of adapters cut a step into programs.

Each program looks at some tokens and one slot, and ends at once if none of them has it: so one
launch serves any mixture of adapters, without sorting tokens, and a recorded graph serves all.
"""

from __future__ import annotations

from dataclasses import dataclass

_FEW_TOKENS = 64
"""Up to here a step is short of programs, and A is cut in pieces of the inner dimension."""
_PIECE = 512
"""Inputs of a piece, at least."""
MOST_PIECES = 16
_ENOUGH_PROGRAMS = 256
DEPTH = 128
"""Inputs that a program of the shrink takes at once."""


@dataclass(frozen=True, slots=True)
class ShrinkTiles:
    """Says what a program computes: `rows` tokens by `cols` outputs, over one of `pieces`."""

    rows: int
    cols: int
    pieces: int
    piece: int


def shrink_tiles(
    num_tokens: int,
    num_outputs: int,
    inner: int,
    fixed_order: bool,
    most_pieces: int = MOST_PIECES,
) -> ShrinkTiles:
    """Returns the tiles for [num_tokens, inner] x [num_outputs, inner]. In fixed order neither the
    sums nor the instructions that make them depend on the number of tokens."""
    is_few = fixed_order or num_tokens <= _FEW_TOKENS
    rows = 16 if fixed_order or num_tokens <= 16 else 64
    cols = max(16, min(64, 1 << (num_outputs - 1).bit_length()))
    pieces = max(1, min(most_pieces, inner // _PIECE))
    if not is_few:
        tiles = -(-num_tokens // rows) * -(-num_outputs // cols)
        pieces = max(1, min(pieces, _ENOUGH_PROGRAMS // tiles))
    piece = -(-inner // (pieces * DEPTH)) * DEPTH
    return ShrinkTiles(rows, cols, -(-inner // piece), piece)


def expand_rows(num_tokens: int, fixed_order: bool) -> int:
    """Returns how many tokens a program of the expand looks at."""
    return 16 if fixed_order or num_tokens <= 16 else 64


def expand_cols(num_tokens: int) -> int:
    """Returns how many outputs a program of the expand adds to."""
    return 64 if num_tokens <= _FEW_TOKENS else 128
