"""Keeps the allowed tokens of the few requests that name them.

A mask of the vocabulary for every row would be large and mostly unused, so rows that need one
borrow an entry of a pool, which grows by doubling and starts empty.

    1. `add_request` gives the row an entry and uploads its mask once.
    2. `apply` forbids everything else in the rows of a batch that have one.
    3. `remove_request` returns the entry.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch.buffer_utils import to_device, to_device_together, with_rows
from engine.batch.input_batch import Int32Array
from engine.sampling_params import SamplingParams

_NO_ENTRY = -1
_FIRST_CAPACITY = 4


class AllowedTokenStates:
    """P entries of `[V]` bool on the device: True where a token is forbidden."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._entries = np.full(max_num_reqs, _NO_ENTRY, np.int32)  # [row]
        self._free: list[int] = []
        self._forbidden = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def add_request(self, row: int, sampling: SamplingParams) -> None:
        """Adds a request; one that may use every token changes nothing."""
        if sampling.allowed_token_ids is None:
            return
        if not self._free:
            self._grow()
        entry = self._free.pop()
        self._entries[row] = entry
        forbidden = np.ones(self._forbidden.shape[1], np.bool_)
        forbidden[list(sampling.allowed_token_ids)] = False
        self._forbidden[entry] = to_device(forbidden, self._device)

    def remove_request(self, row: int) -> None:
        """Removes a request; a row without an entry is left alone."""
        if self._entries[row] != _NO_ENTRY:
            self._free.append(int(self._entries[row]))
            self._entries[row] = _NO_ENTRY

    def needed_by(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` may use some tokens only."""
        is_used = len(self._free) < len(self._forbidden)
        return is_used and bool((self._entries[rows] != _NO_ENTRY).any())

    def apply(self, logits: torch.Tensor, rows: Int32Array) -> None:
        """Sets the forbidden tokens of `logits` [S, V] to -inf; `rows` is [S]."""
        places = np.flatnonzero(self._entries[rows] != _NO_ENTRY).astype(np.int32)
        index, entries = to_device_together([places, self._entries[rows[places]]], self._device)
        chosen = logits.index_select(0, index)
        chosen.masked_fill_(self._forbidden.index_select(0, entries), -torch.inf)
        logits.index_copy_(0, index.long(), chosen)

    def _grow(self) -> None:
        used = len(self._forbidden)
        capacity = min(max(_FIRST_CAPACITY, 2 * used), len(self._entries))
        self._forbidden = with_rows(self._forbidden, capacity)
        self._free.extend(range(capacity - 1, used - 1, -1))
