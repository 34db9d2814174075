"""Says where windows and rows are attended to while the next ones are copied, without Triton."""

from __future__ import annotations

from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.token_rows import RowPages
from tandem_kernels.device import has_warpgroup_mma, num_programs

_DIM = 512


def attends_ahead(q: Tensor, pages: RowPages, metadata: AttentionMetadata) -> bool:
    """Returns whether `window_rows_ahead_kernel` attends: on Hopper, to halves of DeepSeek's size,
    where tokens of more than 16 heads fill the device several times; and not in fixed order, which
    must not depend on their number."""
    num_tokens, num_heads, dim = q.shape
    return (
        num_tokens >= num_programs(q.device, 2)
        and num_heads > 16
        and dim == _DIM
        and q.element_size() == 2
        and isinstance(pages, Tensor)
        and has_warpgroup_mma(q.device)
        and not metadata.fixed_order
    )
