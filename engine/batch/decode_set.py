"""The rows that compute one token in every step, kept as a set that messages change by deltas."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class DecodeSet:
    """`rows` is in rising order, so every rank builds the same batch."""

    def __init__(self, max_num_reqs: int) -> None:
        self._is_member = np.zeros(max_num_reqs, np.bool_)  # [row]
        self._rows: npt.NDArray[np.int32] | None = None

    def add_request(self, row: int) -> None:
        self._is_member[row] = True
        self._rows = None

    def remove_request(self, row: int) -> None:
        """Removes a row, which need not be in the set."""
        self._is_member[row] = False
        self._rows = None

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """Returns the rows, sorted anew only after a change."""
        if self._rows is None:
            self._rows = np.flatnonzero(self._is_member).astype(np.int32)
        return self._rows
