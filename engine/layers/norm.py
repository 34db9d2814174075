"""Root-mean-square normalisation. Source: Zhang and Sennrich, RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.rows import PairOutputs, PartialSum, QuantisedRows, RowForm, UnscaledProduct
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops
from tandem_kernels.elementwise.norm_forms import Norm


class RMSNorm(nn.Module):
    """[T, size] -> [T, size] in the dtype of the input; squares are summed in float32. Whole on
    every rank.

    Args:
        offset: Added to the checkpoint's weight. The sum is kept in float32: 1 + w in half
            precision would lose what w has.
        factor: Multiplies the checkpoint's weight. The product is kept in float32.
        has_weight: The checkpoint has one; else it is 1 throughout.
        order: [size] int64 or None: element i of ours is element `order[i]` of the checkpoint's.
    """

    weight: Tensor

    def __init__(
        self,
        size: int,
        eps: float,
        shard: Shard,
        *,
        offset: float = 0.0,
        factor: float = 1.0,
        has_weight: bool = True,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.has_weight = eps, has_weight
        self.offset, self.factor = offset, factor
        self.order = order
        is_wide = offset != 0.0 or factor != 1.0
        weight = shard.parameter(size, dtype=torch.float32 if is_wide else None)
        if has_weight:
            self.weight = weight
        else:
            self.register_buffer("weight", torch.ones_like(weight), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    @property
    def form(self) -> Norm:
        """Returns it as operations are given it."""
        return Norm(self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum) of two [T, size]. The inputs' memory may be reused."""
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps)

    def add_part(self, x: PartialSum, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Does what `add` does with the sum of `x` [T, size] over ranks, in one launch where the
        ranks' group has a kernel for that."""
        normed = x.group.reduce_norm(x.part, residual, self.weight, self.eps)
        if normed is None:
            return self.add(x.summed(), residual)
        return normed, residual

    def add_pairs(self, x: PairOutputs, residual: Tensor) -> Tensor:
        """Returns the norm [T, size] of the sum of `residual` [T, size] and of what each token's
        experts give; `residual` becomes the sum."""
        return ops.pairs_add_rms_norm(
            x.parts, x.experts, residual, self.weight, self.eps, x.beside, x.gate
        )

    def add_quantised(
        self, x: Tensor | UnscaledProduct | None, residual: Tensor, form: RowForm
    ) -> QuantisedRows:
        """Returns the norm [T, size] of the sum, quantised as `form` says; `residual` [T, size]
        becomes the sum. Without `x` it stays."""
        if x is None:
            return form.normed(residual, None, self.weight, self.eps)
        return form.normed(x, residual, self.weight, self.eps)

    def add_unscaled(self, x: UnscaledProduct, residual: Tensor) -> Tensor:
        """Returns the norm [T, size] of the sum of `residual` and the scaled product;
        `residual` becomes the sum."""
        of = x.row_scales, x.col_scales
        return ops.rms_norm_fp8(x.product, residual, self.weight, self.eps, None, *of)[0]

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        if not self.has_weight:
            return
        shape = tuple(self.weight.shape)
        yield CheckpointWeight(
            prefix + ".weight", self.weight, shape, order=self.order, offset=self.offset
        )

    def scaled_weight(self, name: str) -> CheckpointWeight:
        """Returns the source of the weight where it is a tensor called `name`, to be multiplied by
        `factor`."""

        def fill(stored: Tensor) -> None:
            self.weight.copy_(stored.float() * self.factor)

        return CheckpointWeight(name, self.weight, tuple(self.weight.shape), fill=fill)
