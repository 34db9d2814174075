"""Attention of prompts that have no cached beginning, straight from the projection: by a library
whose kernels are faster than ours there, but cannot read pages."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from tandem_kernels.attention_metadata import AttentionMetadata


class WholePrompts(ABC):
    """
    Attributes:
        name: In logs.
        min_tokens: Shorter prompts take less time together with the rest of the batch.
    """

    name: str
    min_tokens: int

    @abstractmethod
    def attend(
        self, heads: Tensor, num_heads: int, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """Causal attention of the requests in `metadata.whole_prompt_lens`.

        Args:
            heads: [T, Hq + 2 Hkv, D], queries, keys and values of the whole batch, rotated.
            num_heads: Hq.

        Returns:
            [T, Hq, D], whose rows of other requests are anything.
        """

    @abstractmethod
    def prepare(self, num_heads: int, kv_cache: Tensor, max_tokens: int) -> None:
        """Does what takes long the first time, for all prompts up to `max_tokens`."""
