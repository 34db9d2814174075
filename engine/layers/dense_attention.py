"""Attention of a prompt that has no cached beginning, by cuDNN, straight from the projection.

cuDNN prepares a plan for every shape, which takes longer than most prompts; so lengths are padded
to multiples of `BUCKET`, and `prepare_plans` makes all plans ahead of time. Behind a causal mask
padding changes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BUCKET = 256
MIN_TOKENS = 4096
"""Shorter prompts take less time together in our own kernel."""


def is_available(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether cuDNN is the faster one here: on Hopper and later, in half precision."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim in (64, 96, 128)
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and torch.backends.cudnn.enabled
    )


def padded_length(num_tokens: int) -> int:
    return -(-num_tokens // BUCKET) * BUCKET


def dense_attention(heads: Tensor, num_heads: int, scale: float) -> Tensor:
    """Causal attention of one whole prompt.

    Args:
        heads: [L, Hq + 2 Hkv, D], its queries, keys and values, rotated.
        num_heads: Hq.

    Returns:
        [L, Hq, D].
    """
    num_tokens, padded = len(heads), padded_length(len(heads))
    if padded != num_tokens:
        heads = F.pad(heads, (0, 0, 0, 0, 0, padded - num_tokens))
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    q, k, v = (part.transpose(0, 1)[None] for part in torch.split(heads, sizes, dim=1))
    backend = SDPBackend.CUDNN_ATTENTION if heads.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
    return attended[0].transpose(0, 1)[:num_tokens]


def prepare_plans(num_heads: int, kv_cache: Tensor, max_tokens: int) -> None:
    """For all lengths up to `max_tokens`."""
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    for length in range(MIN_TOKENS, max_tokens + 1, BUCKET):
        shape = (length, num_heads + 2 * num_kv_heads, head_dim)
        heads = torch.zeros(shape, dtype=kv_cache.dtype, device=kv_cache.device)
        dense_attention(heads, num_heads, head_dim**-0.5)
