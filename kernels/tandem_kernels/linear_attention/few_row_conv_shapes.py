"""The steps whose convolution `few_row_conv` computes with the projection in front of it."""

from __future__ import annotations

from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.gemm import few_row_shapes
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds


def takes_convolution(x: Tensor, weight: Tensor, taps: Tensor, metadata: StateMetadata) -> bool:
    """Returns whether it takes rows `x` [T, K], a projection's `weight` [N, K] and the `taps` [C,
    W] of channels: few requests of one token each, of which none is pending."""
    return (
        metadata.num_decodes == len(metadata.seq_lens) == len(x)
        and len(x) <= gemm_thresholds(x.device).register_rows
        and metadata.decode_query_len == 1
        and metadata.pending is None
        and taps.shape[1] > 1
        and few_row_shapes.takes(x, weight)
    )
