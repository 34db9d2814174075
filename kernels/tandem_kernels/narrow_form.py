"""Says how a vector is kept whose numbers take a byte: with exponents of its own. Torch-free."""

from __future__ import annotations

NARROW_GROUP = 64
"""Counts the numbers that share an exponent."""
_ALIGNMENT = 8


def num_exponents(count: int) -> int:
    """Returns how many exponents a vector of `count` numbers has. There are more than it needs, so
    that what is behind them in a page can be read as wider numbers."""
    needed = -(-count // NARROW_GROUP)
    return needed + -needed % _ALIGNMENT
