"""Norms around the residual stream, in plain torch."""

from __future__ import annotations

from torch import Tensor

from tandem_kernels.elementwise.norm_forms import Norm, PairedExperts
from tandem_kernels.reference.elementwise import rms_norm
from tandem_kernels.reference.experts import sum_pairs
from tandem_kernels.reference.layouts import NORM, kernel_takes


@kernel_takes(
    x="T | H",
    residual="T | H",
    by=NORM,
    readers=NORM,
    scale="1",
    paired={"parts": "_ H", "experts": "T _: int32", "dense": NORM, "sparse": NORM},
)
def add_normed(
    x: Tensor,
    residual: Tensor,
    by: Norm,
    readers: tuple[Norm, ...] = (),
    scale: Tensor | None = None,
    paired: PairedExperts | None = None,
) -> tuple[Tensor, ...]:
    """Adds the norm of what a block gives to the residual stream, and norms that for its readers.
    Every sum, product and norm is rounded to the stream's dtype.

    Args:
        x: [T, H], what the block gives; with `paired` the dense block.
        residual: [T, H]; becomes the sum, times `scale` [1].
        by: The norm of `x`, or of the sum of what both blocks give.
        readers: At most three.
        paired: What experts give beside it.

    Returns:
        [T, H] for each reader.
    """
    if paired is not None:
        sums = sum_pairs(paired.parts, paired.experts)
        x = rms_norm(x, paired.dense.weight, paired.dense.eps)
        x = x + rms_norm(sums, paired.sparse.weight, paired.sparse.eps)
    residual.add_(rms_norm(x, by.weight, by.eps))
    if scale is not None:
        residual.mul_(scale)
    return tuple(rms_norm(residual, one.weight, one.eps) for one in readers)
