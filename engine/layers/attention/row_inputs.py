"""Holds what a layer is given whose cache is in several groups: a window of tokens, rows that stand
for several, and what tokens leave for the row that is still open."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """Says where a step's tokens are in one group of the cache.

    Attributes:
        slot_mapping: [T] int64, of each token; of a group whose rows stand for several, of the row
            that it closes. -1: nowhere.
        metadata: The ragged batch, with the group's block tables.
    """

    slot_mapping: Tensor
    metadata: AttentionMetadata


def closed_slots(slot_mapping: Tensor, tokens: int) -> Tensor:
    """Returns the slots of the rows that tokens close: of `slot_mapping` [T], which counts tokens,
    those behind which a row of `tokens` ends. -1: a token closes none."""
    closes = slot_mapping % tokens == tokens - 1  # So does -1, whose row is -1.
    return torch.where(closes, slot_mapping.div(tokens, rounding_mode="floor"), -1)
