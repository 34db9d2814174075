"""Describes a step's requests to layers that keep a state of each request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """Ragged batch of R requests, each with one block that holds its state.

    The first `num_decodes` requests have one token each. A request whose tokens are the first of
    its sequence (`seq_lens` equals their number) begins with a state of zeros, whatever its block
    holds: blocks are not cleared when they change hands.

    Attributes:
        blocks: [R] int32, block of each request. Nothing is read or written for `seq_lens` 0.
        query_start_loc: [R + 1] int32, request r owns tokens
            `query_start_loc[r] : query_start_loc[r + 1]`.
        seq_lens: [R] int32, tokens of the sequence with those of this step; 0: a padding request.
        num_decodes: Leading requests with one token each.
    """

    blocks: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_decodes: int
