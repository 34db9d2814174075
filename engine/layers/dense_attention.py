"""Attention of a prompt that has no cached beginning, by cuDNN on a gathered copy of its pages.

The copy costs a few percent of what cuDNN gains on a long prompt. cuDNN prepares a plan for every
shape, which takes longer than most prompts; so lengths are padded to multiples of `BUCKET`, and
`prepare_plans` makes all plans ahead of time. Behind a causal mask padding changes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem_kernels import ops

BUCKET = 256
MIN_TOKENS = 4096
"""Shorter prompts take less time together in our own kernel."""
PROJECTED_MIN_TOKENS = 2048
"""The same where nothing has to be gathered."""


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


def dense_attention(q: Tensor, kv_cache: Tensor, block_table: Tensor, scale: float) -> Tensor:
    """Causal attention of one whole prompt.

    Args:
        q: [L, Hq, D], all tokens of the request.
        kv_cache: [N, 2, Hkv, B, D], their keys and values are written already.
        block_table: [at least padded_length(L) / B] int32. Blocks behind the prompt's own may be
            anybody's.

    Returns:
        [L, Hq, D].
    """
    num_tokens, padded = len(q), padded_length(len(q))
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_blocks = -(-padded // block_size)
    pages = ops.gather_kv_blocks(kv_cache, block_table[:num_blocks])
    heads = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
    keys, values = heads[:, None, :, :padded].unbind()
    queries = q if padded == num_tokens else F.pad(q, (0, 0, 0, 0, 0, padded - num_tokens))
    return _causal(queries.transpose(0, 1)[None], keys, values, scale)[:num_tokens]


def projected_attention(heads: Tensor, num_heads: int, scale: float) -> Tensor:
    """The same from the projection itself: nothing is gathered.

    Args:
        heads: [L, Hq + 2 Hkv, D], queries, keys and values of a whole prompt, rotated.
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
    return _causal(q, k, v, scale)[:num_tokens]


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[1, H, L, D] each -> [L, Hq, D]."""
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
    return attended[0].transpose(0, 1)


def prepare_plans(num_heads: int, kv_cache: Tensor, max_tokens: int, projected: bool) -> None:
    """For all lengths up to `max_tokens`, with queries as the QKV projection leaves them (where
    nothing is padded) and as padding does; the two are alike for `projected_attention`."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    blocks = torch.zeros(
        -(-padded_length(max_tokens) // block_size), dtype=torch.int32, device=kv_cache.device
    )
    shortest = PROJECTED_MIN_TOKENS if projected else MIN_TOKENS
    for length in range(shortest, max_tokens + 1, BUCKET):
        heads = (length, num_heads + 2 * num_kv_heads, head_dim)
        projection = torch.zeros(heads, dtype=kv_cache.dtype, device=kv_cache.device)
        if projected:
            projected_attention(projection, num_heads, head_dim**-0.5)
            continue
        q = projection[:, :num_heads]
        dense_attention(q, kv_cache, blocks, head_dim**-0.5)
        dense_attention(q[1:], kv_cache, blocks, head_dim**-0.5)
