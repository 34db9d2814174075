"""Keeps the allowed tokens of the few requests that name them.

A mask of the vocabulary for every row would be large and mostly unused, so rows that need one
borrow an entry of a pool, which grows by doubling and starts empty.

    1. `add_request` gives the row an entry and uploads its mask once.
    2. `apply` forbids everything else in the rows of a batch that have one.
    3. `remove_request` returns the entry.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from engine.batch.buffer_utils import to_device, upload, with_rows
from engine.batch.input_batch import Int32Array
from engine.contracts.sampling_params import SamplingParams
from tandem_kernels import ops

_NO_ENTRY = -1
_FIRST_CAPACITY = 4


class AllowedTokenStates:
    """P entries of `[ceil(V / 32)]` int32 on the device: one bit a token, as `ops.mask_logits`
    reads it."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._entries = np.full(max_num_reqs, _NO_ENTRY, np.int32)  # [row]
        self._free: list[int] = []
        self._masks = torch.zeros((0, -(-vocab_size // 32)), dtype=torch.int32, device=device)

    def add_request(self, row: int, sampling: SamplingParams) -> None:
        """Adds a request; one that may use every token changes nothing."""
        if sampling.allowed_token_ids is None:
            return
        if not self._free:
            self._grow()
        entry = self._free.pop()
        self._entries[row] = entry
        upload(bit_mask(sampling.allowed_token_ids, self._vocab_size), self._masks[entry])

    def remove_request(self, row: int) -> None:
        """Removes a request; a row without an entry is left alone."""
        if self._entries[row] != _NO_ENTRY:
            self._free.append(int(self._entries[row]))
            self._entries[row] = _NO_ENTRY

    def needed_by(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` may use some tokens only."""
        is_used = len(self._free) < len(self._masks)
        return is_used and bool((self._entries[rows] != _NO_ENTRY).any())

    def apply(self, logits: torch.Tensor, rows: Int32Array, first_token: int = 0) -> None:
        """Sets the forbidden tokens of `logits` [S, v] to -inf, which are of tokens `first_token`,
        a multiple of 32, and on; `rows` is [S]."""
        masks = self._masks[:, first_token // 32 :]
        ops.mask_logits(logits, masks, to_device(self._entries[rows], self._device))

    def _grow(self) -> None:
        used = len(self._masks)
        capacity = min(max(_FIRST_CAPACITY, 2 * used), len(self._entries))
        self._masks = with_rows(self._masks, capacity)
        self._free.extend(range(capacity - 1, used - 1, -1))


def bit_mask(token_ids: Collection[int] | Int32Array, vocab_size: int) -> Int32Array:
    """Returns [ceil(V / 32)] int32 with bit `v % 32` of word `v // 32` set for each token v."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[np.asarray(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
