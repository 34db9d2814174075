"""Keeps Python's collector of reference cycles from stopping all streams at once.

A full collection looks at every object: the hundred thousand of the libraries alone take it 50 ms,
in which nothing is passed on. What is there once the router has been built stays for ever, so it
need not be looked at; the rest is collected in larger, rarer bites. Requests leave few cycles.
"""

from __future__ import annotations

import gc

_YOUNG = 10_000
_MIDDLE = 20
_OLD = 50


def settle() -> None:
    """Leaves out what is there now. Call it once, when all that lasts has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
