"""Whoever guesses the next tokens of rows, so that one step can check several.

    1. a step's tokens are known on the device, and its rows advanced
    2. `propose`: drafts of what follows; they are written behind the known tokens
    3. the next step computes them with the last token, chooses a token behind each, and keeps
       those that are right

Nothing but speed depends on drafts: a token is accepted only if it is the one that would have been
chosen anyway. Too few, wrong ones, and ids that no vocabulary has do no harm.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tandem_kernels.batch_tables import RowTables


class Drafter(Protocol):
    """Proposes drafts. Without one, whatever stands behind the known tokens is taken for drafts."""

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        """Returns [S, K] int64 on the same device: up to `rows.max_drafts` drafts for each of the
        rows `idx_mapping` [S], without waiting for the device."""
