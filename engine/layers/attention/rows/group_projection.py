"""Projects each group of heads by weights of its own: the first half of a low-rank output.

    attended [T, groups, in] ─ weight of the group [rank, in] ─ [T, groups * rank]

Weights in FP8 blocks stay so, and few tokens are multiplied with them as the attention quantises
what it finds; of many, the library multiplies what is written out in half precision. Other formats
are dequantised as they are loaded. Ranks have some of the groups each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.attention.by_head import by_head
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import MergedColumnParallelLinear
from engine.layers.methods.base import ColumnPart, LinearMethod, LinearShare
from engine.layers.methods.formats.weight_format import Dequantised
from engine.layers.methods.plain.plain import Plain
from engine.layers.methods.quantised.fp8_linear import Fp8BlockLinear, fp8_linear
from engine.layers.methods.registry import format_of
from engine.layers.rows import QuantisedRows
from engine.layers.shard import Shard
from engine.quantization import Fp8Scheme, Scheme
from tandem_kernels import ops
from tandem_kernels.gemm.fp8_paths import is_own
from tandem_kernels.reference.fp8 import BLOCK


def group_method(policy: GemmPolicy, scheme: Scheme | None, share: LinearShare) -> LinearMethod:
    """Returns which weights are held: e4m3 where a group's inputs and outputs are whole blocks."""
    plain = Plain()
    if isinstance(scheme, Fp8Scheme):
        method = fp8_linear(scheme, plain, share, policy)
        if isinstance(method, Fp8BlockLinear):
            return method
    form = format_of(scheme, share.name)
    return plain if form is None else Dequantised(plain, form)


class GroupProjection(MergedColumnParallelLinear):
    """[T, groups, in] -> [T, groups * rank], of this rank's groups.

    Args:
        width: Inputs of a group.
        group_rank: Outputs of one.
        groups: Over all ranks.
        head_dim: Of the heads, no two of which share a scale.
    """

    method_for = staticmethod(group_method)

    def __init__(
        self, width: int, group_rank: int, groups: int, head_dim: int, shard: Shard
    ) -> None:
        first, held = shard.part(groups)
        part = ColumnPart(first * group_rank, held * group_rank, groups * group_rank)
        super().__init__(width, (part,), shard)
        self.num_groups, self.fixed_order = held, shard.gemms.deterministic
        self.is_whole = head_dim % BLOCK == 0 and group_rank % BLOCK == 0

    def takes_fp8(self, num_tokens: int) -> bool:
        """Returns whether `quantised` is the faster way for this many tokens."""
        if not self.is_whole or not isinstance(self.method, Fp8BlockLinear):
            return False
        return is_own(num_tokens, self.weight, self.weight_scale)

    def quantised(self, x: QuantisedRows, dtype: torch.dtype) -> Tensor:
        """Does the same for rows [T, groups * in] whose groups of 128 numbers have a scale each."""
        of_weight = self.weight, self.weight_scale
        return ops.fp8_group_gemm(x.numbers, x.scales, *of_weight, self.num_groups, dtype)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        weight: Tensor = self.weight
        if isinstance(self.method, Fp8BlockLinear):
            weight = ops.fp8_dequantise(weight, self.weight_scale, x.dtype)
        weight = weight.view(self.num_groups, -1, self.input_size)
        return by_head(x, weight.transpose(1, 2), fixed_order=self.fixed_order).flatten(1)
