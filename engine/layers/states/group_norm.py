"""Norms of groups of heads that several ranks may have parts of."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.parallel.distributed import ParallelGroup
from kv_transfer.planes import HeadRange
from tandem_kernels import ops


def means_over_ranks(
    x: Tensor,
    gate: Tensor,
    own: HeadRange,
    num_groups: int,
    ranks: ParallelGroup,
    *,
    is_behind: bool = False,
) -> Tensor | None:
    """Returns the mean squares of the group that this rank has a part of, [T, 1] float32; None: it
    has whole groups.

    Args:
        x, gate: [T, D], as `ops.gated_square_sums` takes them; so is `is_behind`.
        own: This rank's groups, of `num_groups`.
    """
    if num_groups >= ranks.size:
        return None
    sums = x.new_zeros((len(x), num_groups), dtype=torch.float32)
    sums[:, own.start] = ops.gated_square_sums(x, gate, 1, is_behind)[:, 0]
    width = x.shape[1] * ranks.size // num_groups
    return ranks.all_reduce(sums)[:, own.start : own.start + 1].contiguous() / width
