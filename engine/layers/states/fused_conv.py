"""The choice between a projection and its short convolution, and both in one launch."""

from __future__ import annotations

from torch import Tensor

from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.base import LinearLayer
from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.few_row_conv_shapes import takes_convolution


def weight_to_convolve(
    layer: LinearLayer, x: Tensor, taps: Tensor, metadata: StateMetadata, policy: GemmPolicy
) -> Tensor | None:
    """Returns the weight [N, K] with which `ops.few_row_conv` computes `layer` of `x` [T, K] and
    the convolution by `taps` [C, W] behind it; None: they are two launches."""
    if policy.few_rows == 0:
        return None
    weight = layer.method.plain_weight(layer)
    takes = weight is not None and takes_convolution(x, weight, taps, metadata)
    return weight if takes else None
