"""Tensors at fixed addresses: one row per live request, and the inputs of one step.

Life of a row:
    1. Staged writes fill the row when its request enters.
    2. `prepare_inputs` reads it for each step the request takes part in.
    3. `post_update` advances it by what the step computed and sampled.
    4. The next request to enter overwrites it; nothing is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowTables:
    """State of every live request, indexed by row. M is the longest sequence.

    Attributes:
        token_ids: [rows, M] int32, prompt and output tokens.
        num_computed: [rows] int32, leading positions whose KV is in the cache.
        total_len: [rows] int32, known tokens: those given at entry and those sampled since.
        max_len: [rows] int32, the row writes no tokens at or beyond this position, and KV of
            `max_drafts` drafts at most.
        block_table: [rows, max_blocks] int32, block ids in logical order, with room for the
            longest sequence and its drafts.
        block_size: Tokens of a KV block.
        max_drafts: Drafts that a decoding row computes behind its last token. They lie behind the
            known tokens in `token_ids`.
        num_taken: [rows] int32, leading tokens that states have taken in, see `state_metadata`;
            None: all that are computed.
    """

    token_ids: Tensor
    num_computed: Tensor
    total_len: Tensor
    max_len: Tensor
    block_table: Tensor
    block_size: int
    max_drafts: int = 0
    num_taken: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Holds what the model and the attention read in one step.

    Attributes:
        input_ids: [max_tokens] int32, indexed by token of the step.
        positions: [max_tokens] int64, indexed by token of the step.
        slot_mapping: [max_tokens] int64, `block * block_size + offset`; -1 writes nothing.
        seq_lens: [rows] int32, indexed by request of the step; 0 for padding.
        block_tables: [rows, max_blocks] int32, indexed by request of the step.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Rows and the inputs of a step as each KV group has them. Groups differ in blocks and slots
    alone, and in what their blocks hold.

    Attributes:
        addresses: [groups, 3] int64: of a row's blocks, and of the step's slots and blocks, which
            keep them.
        sizes: [groups, 2] int32: tokens of a block, and blocks of a row.
    """

    rows: tuple[RowTables, ...]
    inputs: tuple[StepInputs, ...]
    addresses: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, rows: Sequence[RowTables], inputs: Sequence[StepInputs]) -> GroupTables:
        """Takes contiguous tables of one device."""
        pairs = list(zip(rows, inputs, strict=True))
        addresses = [
            [one.data_ptr() for one in (own.block_table, out.slot_mapping, out.block_tables)]
            for own, out in pairs
        ]
        sizes = [[own.block_size, own.block_table.shape[1]] for own, _ in pairs]
        device = inputs[0].slot_mapping.device
        at, of = torch.tensor(addresses), torch.tensor(sizes, dtype=torch.int32)
        return cls(tuple(rows), tuple(inputs), at.to(device), of.to(device))

    @property
    def most_blocks(self) -> int:
        """Returns the most blocks of a row in any group."""
        return max(rows.block_table.shape[1] for rows in self.rows)


@dataclass(frozen=True, slots=True)
class WordTables:
    """Tables of numbers of 4 or 8 bytes, to which pieces are written 4 bytes at a time.

    Attributes:
        words: All words of each table, flat int32.
        addresses: [tables] int64, where each of them begins.
    """

    words: tuple[Tensor, ...]
    addresses: Tensor

    @classmethod
    def of(cls, tables: Sequence[Tensor]) -> WordTables:
        """Takes contiguous tables of one device, which must keep their addresses."""
        words = tuple(table.view(-1).view(torch.int32) for table in tables)
        addresses = torch.tensor([each.data_ptr() for each in words], dtype=torch.int64)
        return cls(words, addresses.to(words[0].device) if words else addresses)
