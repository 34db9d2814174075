"""Loads that come in pieces: what lies in the store moves on to the GPU while more of it is read.

    fetch  piece 0 ──▶ piece 1 ──▶ piece 2
    load               piece 0 ──▶ piece 1 ──▶ piece 2

Each piece is a job of its own; the caller knows the whole by one number. The whole has ended when
nothing of any piece is on its way any more, and is right if all of them were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kv_transfer.tier import Tier

_MOST_BLOCKS = 16
"""In a piece: the part of a prefix that is copied to the GPU after the last of it was read."""


class LoadPieces:
    """`new_number` numbers jobs."""

    def __init__(self, new_number: Callable[[], int]) -> None:
        self._new_number = new_number
        self._whole: dict[int, int] = {}
        self._left: dict[int, set[int]] = {}
        self._failed: set[int] = set()

    def cut(self, whole: int, num_blocks: int, behind: Tier) -> Iterator[tuple[int, slice]]:
        """Returns the numbers of the jobs for a load of `num_blocks`, and the blocks of each."""
        if behind is not Tier.STORE or num_blocks <= _MOST_BLOCKS:
            return iter([(whole, slice(num_blocks))])
        cuts = [slice(i, i + _MOST_BLOCKS) for i in range(0, num_blocks, _MOST_BLOCKS)]
        numbers = [self._new_number() for _ in cuts]
        self._left[whole] = set(numbers)
        self._whole |= dict.fromkeys(numbers, whole)
        return zip(numbers, cuts, strict=True)

    def of(self, whole: int) -> list[int]:
        """Returns the jobs of a load that have not ended."""
        return sorted(self._left.get(whole, {whole}))

    def ended(self, number: int, *, is_right: bool) -> tuple[int, bool] | None:
        """Records the end of a job. Returns the load that has ended with it, and whether all of it
        is right; None: more of it is on its way."""
        whole = self._whole.pop(number, None)
        if whole is None:
            return number, is_right
        if not is_right:
            self._failed.add(whole)
        self._left[whole].discard(number)
        if self._left[whole]:
            return None
        del self._left[whole]
        is_whole_right = whole not in self._failed
        self._failed.discard(whole)
        return whole, is_whole_right
