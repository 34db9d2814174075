"""Finds the places of a step's tokens in the blocks of a cache, once for all layers of the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Says where tokens are written.

    Attributes:
        written: [S], those that are; None: all.
        at: Blocks [S] and places in them [S].
    """

    written: Tensor | None
    at: tuple[Tensor, Tensor]

    def of(self, rows: Tensor) -> Tensor:
        """Returns those of `rows` [T, ...] that are written."""
        return rows if self.written is None else rows.index_select(0, self.written)


def places_of(slot_mapping: Tensor, block_size: int) -> SlotPlaces:
    """Returns where slots [T], `block * B + offset` or -1 for none, are in blocks of B tokens."""
    return _places(tuple(slot_mapping.tolist()), block_size, slot_mapping.device)


@lru_cache(maxsize=8)
def _places(slots: tuple[int, ...], block_size: int, device: torch.device) -> SlotPlaces:
    written = [token for token, slot in enumerate(slots) if slot >= 0]
    found = torch.tensor([slots[token] for token in written], dtype=torch.int64, device=device)
    at = found // block_size, found % block_size
    if len(written) == len(slots):
        return SlotPlaces(None, at)
    return SlotPlaces(torch.tensor(written, dtype=torch.int64, device=device), at)
