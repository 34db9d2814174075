"""The sizes that kernels of 8-bit integers can compute."""

from __future__ import annotations

MULTIPLE = 16
"""The copy engine reads rows that begin at multiples of this many bytes."""
GROUP_MULTIPLE = 32
"""Inputs that share a scale are a multiple of what matrix units take at once."""
