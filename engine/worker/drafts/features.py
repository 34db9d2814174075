"""Keeps what drafters read of the token before, its feature, where the next step finds it.

    1. `take`       the features of a step's T tokens, once the model has computed them
    2. `shifted`    for each of these tokens that of the token before, which for the first one of a
                    request was computed by an earlier step, maybe of another request
    3. `keep`       once the step's tokens are known: that of the last token of each block
    4. `last`       that of the last token of each request, from which drafting begins

A block keeps one feature, that of its last token that is computed. So a request that begins behind
cached blocks, or in blocks that were copied for it, has what it needs.

A chain of networks has a feature in parts, one for each: 1 and 2 go through them in turn, as what a
network makes of the tokens is the next one's part.
"""

from __future__ import annotations

import torch

from engine.batch.input_batch import InputBatch


class DraftFeatures:
    """Features of `size` numbers each, in `parts` of as many. `blocks` [num_blocks + 1, size] is
    set by `use_blocks`, as `is_known` [num_blocks + 1] is: whether all tokens up to a block's last
    one have the drafter's KV. Their last rows are none's."""

    def __init__(
        self,
        size: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: int = 1,
    ) -> None:
        self._width = size // parts
        self._of_step = torch.zeros((max_num_tokens, size), dtype=dtype, device=device)
        self.blocks = torch.zeros((1, size), dtype=dtype, device=device)
        self.is_known = torch.ones(1, dtype=torch.bool, device=device)

    def use_blocks(self, num_blocks: int) -> None:
        """Makes room for the features of a cache's blocks."""
        self.blocks = self.blocks.new_zeros((num_blocks + 1, self.blocks.shape[1]))
        self.is_known = self.is_known.new_ones(num_blocks + 1)

    def forget(self, blocks: torch.Tensor, *, is_known: bool) -> None:
        """Takes note of `blocks` [N] that a peer has filled, with the drafter's KV or without."""
        self.blocks.index_fill_(0, blocks, 0)
        self.is_known.index_fill_(0, blocks, is_known)

    def take(self, features: torch.Tensor, part: int = 0) -> None:
        """Takes a part [T, size / parts] of the features of a step's tokens."""
        self._of_step[: len(features), self._columns(part)].copy_(features)

    def shifted(self, batch: InputBatch, block_size: int, part: int = 0) -> torch.Tensor:
        """Returns [T, size / parts]: a part of the feature of the token before each token of
        `batch`."""
        num_tokens, columns = len(batch.positions), self._columns(part)
        starts, _, before = self._befores(batch, block_size)
        # Requests that are padding begin behind the last token.
        found = self._of_step.new_empty((num_tokens + 1, self._width))
        found[1:] = self._of_step[:num_tokens, columns]
        found.index_copy_(0, starts, self.blocks[:, columns].index_select(0, before))
        return found[:num_tokens]

    def _columns(self, part: int) -> slice:
        return slice(part * self._width, (part + 1) * self._width)

    def keep(self, batch: InputBatch, ends: torch.Tensor, block_size: int) -> torch.Tensor:
        """Keeps what later steps need. `ends` is [R], see `ends_of`. Returns [R] bool: whether all
        tokens of a request have the drafter's KV."""
        lengths = batch.query_start_loc.diff().long()
        _, first, before = self._befores(batch, block_size)
        is_known = self.is_known[before] | (first == 0)
        ends = ends.repeat_interleave(lengths, output_size=batch.num_tokens)
        place, slot = batch.positions, batch.slot_mapping
        is_last = (place + 1 == ends) | ((place + 1) % block_size == 0)
        is_kept = is_last & (place < ends) & (slot >= 0)
        block = torch.where(is_kept, slot // block_size, len(self.blocks) - 1)
        self.blocks.index_copy_(0, block, self._of_step[: batch.num_tokens])
        of_tokens = is_known.repeat_interleave(lengths, output_size=batch.num_tokens)
        self.is_known.index_copy_(0, block, of_tokens)
        return is_known

    def _befores(
        self, batch: InputBatch, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns of each request its first query token, the position of that, and the block of
        the token before it, [R] each."""
        starts = batch.query_start_loc[:-1].long()
        first = batch.positions[starts.clamp(max=len(batch.positions) - 1)]
        block = ((first - 1).clamp(min=0) // block_size).unsqueeze(1)
        tables = batch.block_tables[: len(starts)]
        return starts, first, tables.gather(1, block).squeeze(1).long()

    def last(self, batch: InputBatch, ends: torch.Tensor) -> torch.Tensor:
        """Returns [R, size]: the feature of the last token that each request has computed. `ends`
        is [R], see `ends_of`."""
        starts = batch.query_start_loc[:-1].long()
        index = starts + (ends - 1 - batch.positions[starts]).clamp(min=0)
        return self._of_step.index_select(0, index)

    def copy_blocks(self, copies: torch.Tensor) -> None:
        """Copies features with their blocks; `copies` is [C, 2], pairs (source, target)."""
        source, target = copies.long().unbind(1)
        self.blocks[target] = self.blocks[source]
        self.is_known[target] = self.is_known[source]


def ends_of(batch: InputBatch, total_len: torch.Tensor) -> torch.Tensor:
    """Returns [R] int64: how many tokens of each request are computed, those of a step among them
    as far as they are right. `total_len` is [R], behind the step: all known tokens, whose last one
    is not computed."""
    starts, num_decodes = batch.query_start_loc[:-1].long(), batch.order.num_decodes
    ends = batch.positions[starts] + batch.query_start_loc.diff().long()
    ends[:num_decodes] = torch.minimum(ends[:num_decodes], total_len[:num_decodes].long() - 1)
    return ends
