"""Drafts looked up in a row's own tokens, in plain torch.

Source of the idea: prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.batch.batch_tables import RowTables
from tandem_kernels.reference.layouts import ROWS, kernel_takes

NO_DRAFT = -1


@kernel_takes(idx_mapping="R: int32", rows=ROWS)
def lookup_ngrams(idx_mapping: Tensor, rows: RowTables, min_len: int, max_len: int) -> Tensor:
    """Find where the last tokens of rows came before, and return what followed there.

    Of all places where the longest of the row's last `max_len` to `min_len` tokens came before, the
    latest counts. Where what followed runs into the end of the row, it goes on from that place: a
    text that repeats itself is taken to go on so.

    Args:
        idx_mapping: [R] int32, request of the step -> row; -1 finds nothing.
        rows: `token_ids`, of which the first `total_len` are known, is read.
        min_len: At least 1.
        max_len: At least `min_len`.

    Returns:
        [R, max_drafts] int64; -1 in all places of a row whose last `min_len` tokens are new.
    """
    row = idx_mapping.long().clamp(min=0)
    tokens, length = rows.token_ids[row], rows.total_len[row].long()[:, None]
    width = tokens.shape[1]
    end = torch.arange(width, device=tokens.device)[None]
    matched = torch.zeros_like(tokens, dtype=torch.int64)
    goes_on = (end < length) & (idx_mapping >= 0)[:, None]
    for back in range(1, max_len + 1):
        last = tokens.gather(1, (length - back).clamp(min=0))
        goes_on = goes_on & (end >= back) & (tokens.roll(back, 1) == last)
        matched += goes_on
    best = torch.where(matched >= min_len, matched * width + end, 0).amax(dim=1, keepdim=True)
    place = best % width
    period = (length - place).clamp(min=1)
    drafts = torch.arange(rows.max_drafts, device=tokens.device)[None]
    found = tokens.gather(1, place + drafts % period).long()
    return torch.where(best > 0, found, NO_DRAFT)
