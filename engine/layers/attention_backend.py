"""Whose kernels attend to what; chosen once, when a worker starts, and logged."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import CannotStartError
from engine.layers import flash_attention
from engine.layers.cudnn_prompts import CudnnPrompts
from engine.layers.flash_attention import FlashPrompts
from engine.layers.whole_prompts import WholePrompts
from tandem_kernels import ops
from tandem_kernels.attention_metadata import AttentionMetadata

logger = logging.getLogger(__name__)

PagedAttention = Callable[[Tensor, Tensor, AttentionMetadata, float], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """
    Attributes:
        paged: Of everything but whole prompts; see `reference.attention.paged_attention`.
        whole_prompts: Of prompts without a cached beginning; None: they are like all others.
    """

    paged: PagedAttention = ops.paged_attention
    whole_prompts: WholePrompts | None = None

    @property
    def whole_prompts_from(self) -> int | None:
        """Prompts of so many tokens are attended apart; None: no prompts are."""
        return None if self.whole_prompts is None else self.whole_prompts.min_tokens


OWN_ATTENTION = AttentionBackend()


class AttentionBackendError(CannotStartError):
    """This machine or model does not have the kernels that the setting wants."""


def choose_attention(config: EngineConfig, device: torch.device) -> AttentionBackend:
    """Raises `AttentionBackendError`."""
    wanted = config.device.attention_backend
    if config.device.deterministic:
        wanted = "triton"
    shape = getattr(torch, config.model.dtype), config.model.head_dim, device
    if wanted == "flash-attn":
        _check_flash_attention(*shape)
        logger.info("attention: FlashAttention 3")
        return AttentionBackend(flash_attention.flash_attention)
    prompts = _whole_prompts(*shape) if wanted == "auto" else None
    if prompts is None:
        logger.info("attention: %s", "Triton" if device.type == "cuda" else "torch")
        return OWN_ATTENTION
    logger.info("attention of whole prompts: %s; of all others: Triton", prompts.name)
    return AttentionBackend(whole_prompts=prompts)


def _whole_prompts(dtype: torch.dtype, head_dim: int, device: torch.device) -> WholePrompts | None:
    """The fastest that is there. A library that is installed and does not load is no reason not
    to start: it may have been built for another torch."""
    package = FlashPrompts.package(dtype, head_dim, device)
    if package is not None:
        try:
            return FlashPrompts(package)
        except (ImportError, OSError) as error:
            logger.warning("%s is installed but does not load: %s", package, error)
    return CudnnPrompts() if CudnnPrompts.is_available(dtype, head_dim, device) else None


def _check_flash_attention(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    if not flash_attention.is_installed():
        raise AttentionBackendError(
            f"attention_backend flash-attn needs the package {flash_attention.PACKAGE} "
            "(FlashAttention 3 for Hopper); install it, or choose auto or triton"
        )
    if not flash_attention.is_available(dtype, head_dim, device):
        raise AttentionBackendError(
            f"FlashAttention 3 does not compute {dtype} with heads of {head_dim} on {device}; "
            "choose auto or triton as attention_backend"
        )
    try:
        importlib.import_module(flash_attention.PACKAGE)
    except (ImportError, OSError) as error:
        raise AttentionBackendError(
            f"{flash_attention.PACKAGE} is installed but does not load: {error}; install it for "
            f"torch {torch.__version__}, or choose auto or triton as attention_backend"
        ) from error
