"""Holds what a layer is given whose cache is in several groups: a window of tokens, rows that stand
for several, and what tokens leave for the row that is still open."""

from __future__ import annotations

from dataclasses import dataclass

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
