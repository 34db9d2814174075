"""Attention of each token over what blocks of layers have added to its stream, in plain torch.

Source: Moonshot AI, Attention Residuals (arXiv 2603.15031), as Kimi K3's published code has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.reference.layouts import kernel_takes


@kernel_takes(last="T | H", blocks="_ | T H", query="H", weight="H")
def mix_blocks(blocks: Tensor, last: Tensor, query: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Sums up blocks, each by the softmax of what `query` finds in its norm.

    Args:
        blocks: [n, T, H] of the blocks that are complete; their tokens lie behind each other.
        last: [T, H] of the one that is not.
        query: [H].
        weight: [H] of the norm, whose `eps` this is.

    Returns:
        [T, H] in the dtype of `last`.
    """
    values = torch.cat((blocks, last[None])).float()
    found = (values * (query.float() * weight.float())).sum(-1)
    scores = found * torch.rsqrt(values.square().mean(-1) + eps)
    shares = scores.T.contiguous().softmax(-1).T
    mixed = values[-1] * shares[-1, :, None]
    for value, share in zip(values[:-1], shares[:-1], strict=True):
        mixed = mixed + value * share[:, None]
    return mixed.to(last.dtype)
