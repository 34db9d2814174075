"""Attention over the paged KV cache. Sources: Kwon et al., PagedAttention (arXiv 2309.06180);
Ainslie et al., grouped queries (arXiv 2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.layers.attention.backend import AttentionBackend, AttentionSpec
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import KVScales


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Holds what all layers of one step share.

    Attributes:
        positions: [T] int64.
        cos_sin_cache: [max_model_len, head_dim] float32.
        slot_mapping: [T] int64, where each token's key and value go; -1: nowhere.
        metadata: The ragged batch, as `backend` made it.
        query_scales: [T] float32, by which queries are multiplied when they are rotated; None: by
            nothing.
        kept: The same of the tokens that the last layer keeps, each of which decodes: its request's
            keys are in the cache. None: they are attended with all others.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    slot_mapping: Tensor
    metadata: AttentionMetadata
    backend: AttentionBackend
    kept: AttentionMetadata | None = None
    query_scales: Tensor | None = None

    def scale_queries(self, queries: Tensor) -> None:
        """Multiplies `queries` [T, Hq, D] in place, where scores grow with the position."""
        if self.query_scales is not None:
            queries.mul_(self.query_scales[:, None, None])


class Attention(nn.Module):
    """Attends over one layer's cache [N, 2, Hkv, B, D], once the step's keys and values are there.

    Args:
        num_heads, num_kv_heads: Of this rank.
        scale: Factor of the scores; None: head_dim ** -0.5.
        softcap, sinks, kv_scales: See `AttentionSpec`.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> None:
        super().__init__()
        scale = head_dim**-0.5 if scale is None else scale
        self.spec = AttentionSpec(
            num_heads, num_kv_heads, head_dim, scale, softcap, sinks, kv_scales
        )

    def write(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        inputs: AttentionInputs,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rotates, and writes keys and values into the cache: [T, (Hq + 2 Hkv) * D] -> heads
        [T, Hq + 2 Hkv, D] in the same memory. The weights, [D], normalise each head before RoPE.
        """
        spec = self.spec
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        ops.rope_and_cache(
            q,
            k,
            v,
            inputs.positions,
            inputs.cos_sin_cache,
            kv_cache,
            inputs.slot_mapping,
            q_weight,
            k_weight,
            eps,
            keep_k=inputs.backend.reads_new_keys(inputs.metadata),
            kv_scales=spec.kv_scales,
        )
        return heads

    def forward(
        self,
        heads: Tensor,
        kv_cache: Tensor,
        inputs: AttentionInputs,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Attends: heads as `write` returns them -> [T, Hq * D], or the rows `kept` [n] of it."""
        spec, backend = self.spec, inputs.backend
        if kept is not None and inputs.kept is not None:
            few = heads.index_select(0, kept)
            return backend.attend(spec, few, kv_cache, inputs.kept).flatten(1)
        attended = backend.attend(spec, heads, kv_cache, inputs.metadata).flatten(1)
        return attended if kept is None else attended.index_select(0, kept)
