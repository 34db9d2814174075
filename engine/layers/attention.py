"""Attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from engine.layers.attention_backend import OWN_ATTENTION, AttentionBackend
from tandem_kernels import ops
from tandem_kernels.attention_metadata import AttentionMetadata


@dataclass(frozen=True)
class AttentionInputs:
    """What all layers of one step share.

    Attributes:
        positions: [T] int64.
        cos_sin_cache: [max_model_len, head_dim] float32.
        slot_mapping: [T] int64, where each token's key and value go; -1: nowhere.
        metadata: The ragged batch.
        backend: Whose kernels attend.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    slot_mapping: Tensor
    metadata: AttentionMetadata
    backend: AttentionBackend = OWN_ATTENTION

    @cached_property
    def decodes(self) -> AttentionMetadata:
        """Made once a step, where whole prompts are attended apart."""
        return self.metadata.decodes()

    @cached_property
    def behind_whole_prompts(self) -> AttentionMetadata:
        """Made once a step, likewise."""
        return self.metadata.behind_whole_prompts()


class Attention(nn.Module):
    """Rotates, writes the step's keys and values into one layer's cache, and attends.

    Args:
        num_heads, num_kv_heads: Of this rank.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    def forward(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        inputs: AttentionInputs,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """[T, (Hq + 2 Hkv) * D] -> [T, Hq * D]. The weights normalise each head before RoPE."""
        metadata = inputs.metadata
        heads = qkv.view(len(qkv), -1, self.head_dim)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        q = ops.rope_and_cache(
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
            keep_k=len(metadata.whole_prompt_lens) > 0,
        )
        if metadata.whole_prompt_lens:
            return self._attend_apart(heads, kv_cache, inputs).flatten(1)
        return inputs.backend.paged(q, kv_cache, metadata, self.scale).flatten(1)

    def _attend_apart(self, heads: Tensor, kv_cache: Tensor, inputs: AttentionInputs) -> Tensor:
        """Whole prompts, and what is before and behind them. `heads`: [T, Hq + 2 Hkv, D]."""
        metadata, backend = inputs.metadata, inputs.backend
        assert backend.whole_prompts is not None
        attended = backend.whole_prompts.attend(heads, self.num_heads, metadata, self.scale)
        num_decodes, end = metadata.num_decodes, metadata.whole_prompts_end
        if num_decodes > 0:
            q = heads[:num_decodes, : self.num_heads]
            attended[:num_decodes] = backend.paged(q, kv_cache, inputs.decodes, self.scale)
        if end < len(heads):
            q = heads[end:, : self.num_heads]
            others = inputs.behind_whole_prompts
            attended[end:] = backend.paged(q, kv_cache, others, self.scale)
        return attended
