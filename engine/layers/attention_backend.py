"""Whose kernels attend to what; chosen once, when a worker starts, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.layers import dense_attention, flash_attention
from tandem_kernels import ops
from tandem_kernels.attention_metadata import AttentionMetadata

logger = logging.getLogger(__name__)

PagedAttention = Callable[[Tensor, Tensor, AttentionMetadata, float], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """
    Attributes:
        paged: Of everything but whole prompts; see `reference.attention.paged_attention`.
        whole_prompts_from: Prompts of so many tokens without a cached beginning are attended by
            cuDNN, one by one; None: no prompts are.
    """

    paged: PagedAttention = ops.paged_attention
    whole_prompts_from: int | None = None


OWN_ATTENTION = AttentionBackend()


def choose_attention(config: EngineConfig, device: torch.device) -> AttentionBackend:
    """Raises `RuntimeError` when the setting wants what this machine does not have."""
    wanted = config.device.attention_backend
    if config.device.deterministic:
        wanted = "triton"
    shape = getattr(torch, config.model.dtype), config.model.head_dim, device
    if wanted == "flash-attn":
        _check_flash_attention(*shape)
        logger.info("attention: FlashAttention 3")
        return AttentionBackend(flash_attention.flash_attention)
    if wanted == "auto" and dense_attention.is_available(*shape):
        logger.info("attention of whole prompts: cuDNN; of all others: Triton")
        return AttentionBackend(whole_prompts_from=dense_attention.MIN_TOKENS)
    logger.info("attention: %s", "Triton" if device.type == "cuda" else "torch")
    return OWN_ATTENTION


def _check_flash_attention(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    if not flash_attention.is_installed():
        raise RuntimeError(
            f"attention_backend flash-attn needs the package {flash_attention.PACKAGE} "
            "(FlashAttention 3 for Hopper); install it, or choose auto or triton"
        )
    if not flash_attention.is_available(dtype, head_dim, device):
        raise RuntimeError(
            f"FlashAttention 3 does not compute {dtype} with heads of {head_dim} on {device}; "
            "choose auto or triton as attention_backend"
        )
