"""How the decode attention kernel runs best, by shape (`tunings/*/decode_attention.json`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Says how one shape runs best; found by measurement inside whole decode steps. Alone, back to
    back, fewer and larger programs look as good; behind a GEMM they start later.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


_TABLE = plain_table("decode_attention", DecodeTuning, ("num_units", "row_bytes", "itemsize"))


def decode_tuning(
    device: torch.device, num_units: int, head_dim: int, dtype: torch.dtype
) -> DecodeTuning:
    """Chooses by `num_units`: requests times KV heads, which cost the same when contexts
    are alike.
    """
    row_bytes = (1 << (head_dim - 1).bit_length()) * dtype.itemsize
    return _TABLE.choose(device, num_units, row_bytes, dtype.itemsize)
