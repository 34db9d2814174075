"""Places of recorded steps with prompts, in which requests may decode with drafts.

What a graph holds knows of its requests no more than the device does. So each has as many places as
a decode may have; of a chunk of a prompt, and of padding, all are one, and the first counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.batch.input_batch import BatchOrder, InputBatch
from engine.batch.places import NO_TOKEN, Int32Array
from tandem_kernels.batch.batch_tables import RowTables

_NO_DRAFT = -2
"""Is no token, and not what stands for none."""


@dataclass(frozen=True, slots=True)
class HiddenPlaces:
    """Has W places for each of R requests. The first is behind its last known token, the others are
    behind its drafts. Where it has fewer, the last is there again, and nothing is accepted."""

    indices: torch.Tensor
    """[R W], the query token in front of each."""
    idx_mapping: torch.Tensor
    """[R W] int32, the row of each."""
    seq_lens: torch.Tensor
    """[R W] int32, tokens before each place, drafts among them: the new token's index."""
    drafts: torch.Tensor
    """[R, W - 1], behind each place but the last, or `_NO_DRAFT`."""

    @classmethod
    def of(cls, batch: InputBatch, width: int, rows: RowTables) -> HiddenPlaces:
        """Finds them, before the rows advance."""
        starts, row = batch.query_start_loc.long(), batch.idx_mapping.long().clamp(min=0)
        query_lens = starts.diff()
        known = rows.total_len[row].long() - rows.num_computed[row].long()
        known = torch.minimum(known.clamp(min=1), query_lens)
        ahead = torch.arange(width, device=row.device)
        behind = torch.minimum(ahead, (query_lens - known).unsqueeze(1))
        indices = ((starts[:-1] + known - 1).unsqueeze(1) + behind).clamp(0, batch.num_tokens - 1)
        drafts = batch.input_ids[indices[:, 1:]].masked_fill(behind[:, 1:] < ahead[1:], _NO_DRAFT)
        flat = indices.flatten()
        return cls(
            indices=flat,
            idx_mapping=batch.idx_mapping.repeat_interleave(width, output_size=len(flat)),
            seq_lens=batch.positions[flat].int() + 1,
            drafts=drafts,
        )

    def accept(self, chosen: torch.Tensor) -> torch.Tensor:
        """Returns [R, W] int64: the tokens that each request gets, then -1. `chosen` is [R W]."""
        tokens = chosen.view(len(self.drafts), -1)
        is_right = (tokens[:, :-1] == self.drafts).long().cumprod(dim=1).bool()
        return torch.cat([tokens[:, :1], tokens[:, 1:].masked_fill(~is_right, NO_TOKEN)], dim=1)


def places_in_recorded(order: BatchOrder, width: int) -> Int32Array:
    """Returns [L]: which of the `HiddenPlaces` of a recorded step, `width` of each request, are the
    `Places` of the step that it computed."""
    firsts = np.arange(order.num_sampled, dtype=np.int32) * np.int32(width)
    of_decodes = firsts[: order.num_decodes, None] + np.arange(
        order.decode_query_len, dtype=np.int32
    )
    return np.concatenate([of_decodes.ravel(), firsts[order.num_decodes :]])
