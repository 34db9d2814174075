"""Describes requests whose queries, keys and values lie behind each other, without pages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Ragged batch of R requests.

    Attributes:
        query_bounds, key_bounds: [R + 1] int32, request r owns rows `bounds[r] : bounds[r + 1]`.
        max_query_len, max_key_len: Of a request, known on the host.
        causal: The last query sees all keys, and each one before it one key less; else all see all.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
