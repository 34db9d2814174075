"""Keeps Python's collector of reference cycles from stopping what others wait for.

A full collection looks at every object: the hundred thousand of the libraries alone take it 50 ms.
What is there once a process is ready stays for ever, so it need not be looked at; the rest is
collected in larger, rarer bites. Requests and steps leave few cycles.
"""

from __future__ import annotations

import gc

_YOUNG, _MIDDLE, _OLD = 5_000, 50, 100
"""Collections of 50,000 young objects took 30 to 80 ms beside 100 answers."""


def settle(young: int = _YOUNG, middle: int = _MIDDLE, old: int = _OLD) -> None:
    """Leaves out what is there now. Call it when all that lasts has been made.

    Args:
        young, middle, old: `gc.set_threshold`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, old)
