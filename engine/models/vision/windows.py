"""The order in which a vision tower computes an image's patches, and who attends to whom.

Patches of a token lie together throughout. Windows of equal size lie together as well, so that each
size is one batch of attention:

    tokens of a grid        windows of 4 x 4 tokens, largest first
    a a a a b b             a: 16 tokens, 1 window
    a a a a b b     ──▶     b:  8 tokens, 1 window
    a a a a b b             c:  4 tokens, 1 window
    a a a a b b             d:  2 tokens, 1 window
    c c c c d d
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """Attributes:
    tokens: [n] int64: place i of the order is this token of the grid, counted by rows.
    batches: (windows, tokens of each) of each size, in the order of places.
    """

    tokens: Int64Array
    batches: tuple[tuple[int, int], ...]


def window_order(rows: int, columns: int, side: int) -> WindowOrder:
    """Returns the order of a grid of tokens in windows of `side` x `side`; 0: one of all."""
    grid = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)
    if side == 0:
        return WindowOrder(grid.reshape(-1), ((1, rows * columns),))
    windows = [
        grid[top : top + side, left : left + side].reshape(-1)
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    windows.sort(key=len, reverse=True)
    sizes = [len(window) for window in windows]
    batches = tuple((sizes.count(size), size) for size in dict.fromkeys(sizes))
    return WindowOrder(np.concatenate(windows), batches)


def patch_places(rows: int, columns: int, merge_size: int, num_pairs: int = 1) -> Int64Array:
    """Returns [patches, 3] int64: row, column and time of each patch of an image, or of pairs of
    frames, patches of a token together."""
    token_rows, token_columns = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    inner_rows, inner_columns = np.divmod(np.arange(merge_size**2, dtype=np.int64), merge_size)
    of_rows = token_rows[:, None] * merge_size + inner_rows
    of_columns = token_columns[:, None] * merge_size + inner_columns
    one = np.stack((of_rows.reshape(-1), of_columns.reshape(-1)), axis=1)
    times = np.arange(num_pairs, dtype=np.int64).repeat(len(one))
    return np.concatenate((np.tile(one, (num_pairs, 1)), times[:, None]), axis=1)
