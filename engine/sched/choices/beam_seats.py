"""Says who sits where among the rows of a beam search: the rule that scheduler and workers share.

    seat           0        1        2
    continued by   -     2 beams   1 beam      the first successor stays in its parent's seat,
    parent seat    1        1        2         others take seats that nothing continues, in order

So what is copied from one row to another is never written at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence


def seats_of(parents: Sequence[int]) -> list[int]:
    """Returns the seats of beams, the best first, that continue those in the seats `parents`."""
    free = iter(sorted({*range(len(parents))} - {*parents}))
    taken: set[int] = set()
    seats = []
    for parent in parents:
        seats.append(next(free) if parent in taken else parent)
        taken.add(parent)
    return seats
