"""Keeps Python's collector of reference cycles from stopping all streams at once.

What is there once the router has been built stays for ever, so it need not be looked at; the rest
is collected in small bites (10,000 young objects took 4.5 ms, 2,000 still 0.9, for which tokens of
all streams waited), and old objects rarely. Requests leave few cycles.

A middle collection looks at all that has come since the last one and is still there: after 2,000
young ones, while 4,000 streams began, that took 0.1 s, after 100 with 3,000 open ones 25 ms.
"""

from __future__ import annotations

from edge import program

_YOUNG = 100
_MIDDLE = 10
_OLD = 10_000


def settle() -> None:
    """Leaves out what is there now. Call it once, when all that lasts has been made."""
    program.settle(_YOUNG, _MIDDLE, _OLD)
