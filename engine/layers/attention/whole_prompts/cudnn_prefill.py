"""Uncached prefill by cuDNN, which is part of torch.

It prepares a plan for every shape, which takes longer than most prompts; so prompts are attended
one by one, their lengths are padded to multiples of `BUCKET`, and `prepare` makes all plans ahead
of time. Behind a causal mask padding changes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.layers.attention.backend import AttentionSpec
from engine.layers.attention.whole_prompts.uncached_prefill import (
    DensePrefill,
    UncachedPrefillMetadata,
)
from tandem_kernels.attention.kv_pages import PagedKV, sizes_of
from tandem_kernels.device import has_capability

BUCKET = 256


class CudnnPrefill(DensePrefill):
    name = "cuDNN"

    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens

    @staticmethod
    def is_available(
        dtype: torch.dtype, head_dim: int, device: torch.device, v_head_dim: int | None = None
    ) -> bool:
        """Returns whether it is the faster one here: on Hopper and later, in half precision, with
        values as wide as keys."""
        return (
            has_capability(device, (9, 0))
            and dtype in (torch.float16, torch.bfloat16)
            and head_dim in (64, 96, 128)
            and v_head_dim in (None, head_dim)
            and torch.backends.cudnn.enabled
        )

    def attend(
        self, spec: AttentionSpec, heads: Tensor, metadata: UncachedPrefillMetadata
    ) -> Tensor:
        lengths, num_heads, scale = metadata.prompt_lens, spec.num_heads, spec.scale
        heads = heads.view(len(heads), -1, spec.head_dim)
        if sum(lengths) == len(heads) and len(lengths) == 1:
            return _attend(heads, num_heads, scale)
        attended = torch.empty_like(heads[:, :num_heads], memory_format=torch.contiguous_format)
        start = metadata.num_decode_tokens
        for length in lengths:
            end = start + length
            attended[start:end] = _attend(heads[start:end], num_heads, scale)
            start = end
        return attended

    def prepare(
        self, num_heads: int, kv_cache: PagedKV, dtype: torch.dtype, max_tokens: int
    ) -> None:
        num_kv_heads, _, head_dim, _ = sizes_of(kv_cache)
        for length in range(self.min_tokens, max_tokens + 1, BUCKET):
            shape = (length, num_heads + 2 * num_kv_heads, head_dim)
            heads = torch.zeros(shape, dtype=dtype, device=kv_cache.device)
            _attend(heads, num_heads, head_dim**-0.5)


def padded_length(num_tokens: int) -> int:
    return -(-num_tokens // BUCKET) * BUCKET


def _attend(heads: Tensor, num_heads: int, scale: float) -> Tensor:
    """Attends within one prompt: [L, Hq + 2 Hkv, D] -> [L, Hq, D]."""
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
