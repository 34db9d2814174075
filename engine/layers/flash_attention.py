"""FlashAttention 3 over the paged cache, where its package (`flash_attn_interface`) is installed.

It reads lengths on the device and takes any strides, so our cache and metadata serve it as they
are, in CUDA graphs too. FlashInfer is not here: it plans each step on the host from lengths that
only the device knows.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import cast

import torch
from torch import Tensor

from tandem_kernels.attention_metadata import AttentionMetadata

PACKAGE = "flash_attn_interface"


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def is_available(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether its kernels are made for this."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim <= 256
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(device)[0] == 9
    )


def flash_attention(
    q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `tandem_kernels.reference.attention.paged_attention`. Rows of requests with `seq_lens` 0
    are anything."""
    keys, values = kv_cache.transpose(2, 3).unbind(1)
    attended = importlib.import_module(PACKAGE).flash_attn_with_kvcache(
        q,
        keys,
        values,
        cache_seqlens=metadata.seq_lens,
        page_table=metadata.block_tables,
        cu_seqlens_q=metadata.query_start_loc,
        max_seqlen_q=metadata.max_query_len,
        softmax_scale=scale,
        causal=True,
    )
    return cast(Tensor, attended)
