"""Proposes the next tokens of rows, so that one step can verify several.

    1. a step's tokens are known on the device, and its rows advanced
    2. `propose`: drafts of what follows; they are written behind the known tokens
    3. the next step computes them with the last token, chooses a token behind each, and keeps
       those that are right

Nothing but speed depends on drafts: a token is accepted only if it is the one that would have been
chosen anyway. Too few, wrong ones, and ids that no vocabulary has do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from engine.batch.buffer_utils import to_device
from engine.batch.input_batch import BatchOrder
from engine.batch.places import NO_TOKEN
from engine.config import EngineConfig, SpeculativeConfig
from tandem_kernels import ops
from tandem_kernels.batch.batch_tables import RowTables


class Drafter(Protocol):
    """Proposes drafts. Without one, whatever stands behind the known tokens is taken for drafts."""

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        """Returns [S, K] int64 on the same device: up to `rows.max_drafts` drafts for each of the
        rows `idx_mapping` [S], without waiting for the device. Ids behind the last draft of a row
        are negative."""


class NgramDrafter:
    """Takes what followed the last tokens where the row, prompt or answer, had them before."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._min_len, self._max_len = config.prompt_lookup_min, config.prompt_lookup_max

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        return ops.lookup_ngrams(idx_mapping, rows, self._min_len, self._max_len)


class Drafts:
    """Asks for the drafts of one rank's rows, and counts them. They lie in the rows."""

    def __init__(self, config: EngineConfig, rows: RowTables) -> None:
        self.drafter: Drafter | None = None
        if config.speculative is not None and config.draft is None:
            self.drafter = NgramDrafter(config.speculative)
        self._vocab_size = config.model.vocab_size
        self._rows = rows
        self._counts = torch.zeros_like(rows.total_len)
        """[rows] int32, of the latest that were proposed."""

    def begin(self, rows: Sequence[int]) -> None:
        """Takes note of rows whose next tokens nothing has drafted, and which decode."""
        if self.drafter is None or not rows:
            return
        begun = to_device(np.array(rows, np.int32), self._counts.device)
        self._counts.index_fill_(0, begun.long(), 0)
        none = begun.new_full((len(rows), self._rows.max_drafts), NO_TOKEN, dtype=torch.int64)
        ops.write_drafts(begun, none, self._vocab_size, self._rows)

    def num_checked(self, order: BatchOrder, idx_mapping: torch.Tensor) -> torch.Tensor | None:
        """Returns [num_sampled] int32, how many drafts a step checks of each request that samples:
        those of decodes. None: nothing drafts. `idx_mapping` is [R], the step's."""
        if self.drafter is None or order.num_decodes == 0 or order.decode_query_len == 1:
            return None
        counts = self._counts.index_select(0, idx_mapping[: order.num_sampled])
        counts[order.num_decodes :] = 0
        return counts.clamp_(max=order.decode_query_len - 1)

    def propose(
        self,
        order: BatchOrder,
        idx_mapping: torch.Tensor,
        token_ids: torch.Tensor,
        forced: torch.Tensor | None = None,
        num_drafts: int | None = None,
    ) -> None:
        """Asks for drafts of the rows that got tokens. `idx_mapping` is [R], the step's;
        `token_ids` [S, W] are what they got. `forced` [S, N]: those and the ones behind, where a
        grammar leaves no choice; they are drafts of any drafter. `num_drafts`: of each row; None:
        as many as there may be."""
        if self.drafter is None or order.num_sampled == 0:
            return
        sampled = idx_mapping[: order.num_sampled]
        if num_drafts == 0:
            self._counts.index_fill_(0, sampled.long(), 0)
            return
        rows = self._rows if num_drafts is None else replace(self._rows, max_drafts=num_drafts)
        drafts = self.drafter.propose(sampled, rows)
        if forced is not None:
            drafts = _with_forced(drafts, token_ids, forced)
        ops.write_drafts(sampled, drafts, self._vocab_size, self._rows)
        proposed = (drafts >= 0).int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)
        self._counts.index_copy_(0, sampled.long(), proposed)


def _with_forced(
    drafts: torch.Tensor, token_ids: torch.Tensor, forced: torch.Tensor
) -> torch.Tensor:
    """Returns `drafts` [S, K] with what is forced behind the tokens [S, W] of each request."""
    num_new = (token_ids >= 0).sum(dim=1, keepdim=True)
    place = num_new + torch.arange(drafts.shape[1], device=drafts.device)
    last = forced.shape[1] - 1
    found = forced.long().gather(1, place.clamp(max=last)).masked_fill(place > last, -1)
    return torch.where(found[:, :1] >= 0, found, drafts)
