"""The choice of an attention backend, made once when a worker starts, and logged."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from typing import Any

import torch

from engine.config import EngineConfig
from engine.head_sizes import HeadSizes
from engine.layers.attention.backend import AttentionBackend
from engine.layers.attention.context_passes import PASS_TOKENS
from engine.layers.attention.latent_backend import LatentBackend, LatentShape
from engine.layers.attention.paged import PagedBackend
from engine.layers.attention.whole_prompts import flash_attention
from engine.layers.attention.whole_prompts.cudnn_prefill import CudnnPrefill
from engine.layers.attention.whole_prompts.flash_attention import FlashPrefill, FlashRagged
from engine.layers.attention.whole_prompts.flash_limits import AttentionBackendError, check_wanted
from engine.layers.attention.whole_prompts.uncached_prefill import (
    DensePrefill,
    UncachedPrefillBackend,
)
from tandem_kernels.attention.attention_thresholds import whole_prompts
from tandem_kernels.device import gpu_name, has_e4m3, is_gpu

logger = logging.getLogger(__name__)

TOKENS_OF_TWO_PASSES = 2 * PASS_TOKENS
"""The tokens that prompts behind contexts attend to in two passes, together."""
_NOT_LOADED = "%s is installed but does not load: %s"


def choose_attention(
    config: EngineConfig,
    device: torch.device,
    *,
    rare_attention: str = "",
    has_sinks: bool = False,
    latent: LatentShape | None = None,
    dense_tokens: int | None = None,
    masked_tokens: int = 0,
    recorded_tokens: int = 0,
) -> AttentionBackend:
    """Returns the backend that the setting and this device ask for.

    Args:
        rare_attention: Names what only our own kernels know of this model's attention.
        has_sinks: Its heads have attention sinks.
        latent: The sizes of its latent attention; None: it has none.
        dense_tokens: See `PagedBackend`.
        masked_tokens: See `LatentBackend`.
        recorded_tokens: The tokens of the largest step with prompts that is a CUDA graph.

    Raises:
        AttentionBackendError: The kernels that the setting wants are not here.
    """
    wanted = config.device.attention_backend
    has_window = [group.window is not None for group in config.kv_layout.groups]
    check_wanted(config, rare_attention)
    if config.cache.kv_scales is not None:
        _check_fp8_cache(device)
    records = is_gpu(device) and not config.device.enforce_eager
    of_recorded: dict[str, Any] = {
        "dense_tokens": dense_tokens,
        "recorded_tokens": recorded_tokens,
        "recorded_context": config.model.max_model_len if records else 0,
    }
    if latent is not None:
        found = _latent_backend(config, device, latent)
        return replace(found, masked_tokens=masked_tokens, **of_recorded)
    if config.device.deterministic or rare_attention or all(has_window):
        wanted = "triton"
    dtype, seeing = getattr(torch, config.model.dtype), _heads_that_see_everything(config)
    if wanted == "flash-attn":
        for heads in seeing:
            _check_flash_attention(dtype, heads, device)
        logger.info("attention: FlashAttention 3")
        return PagedBackend(flash_attention.flash_attention, **of_recorded)
    dense = None
    if wanted == "auto" and len(seeing) == 1:
        dense = _dense_prefill(dtype, seeing[0], device, has_sinks=has_sinks)
    if dense is None:
        logger.info("attention: %s", "Triton" if is_gpu(device) else "torch")
        return PagedBackend(fixed_order=config.device.deterministic, **of_recorded)
    which = "uncached" if dense.ragged is None else "long"
    logger.info("attention of %s prompts: %s; of all others: Triton", which, dense.name)
    return UncachedPrefillBackend(
        dense, PagedBackend(**of_recorded), recorded_tokens=recorded_tokens
    )


def _heads_that_see_everything(config: EngineConfig) -> list[HeadSizes]:
    """Returns the heads of layers without a window, each kind of width once."""
    kinds: dict[tuple[int, int], HeadSizes] = {}
    for group in config.kv_layout.groups:
        if group.window is None and not group.is_state:
            of_model = [layer for layer in group.layers if layer < config.model.num_layers]
            for heads in map(config.model.heads_of, of_model):
                kinds.setdefault((heads.head_dim, heads.v_head_dim), heads)
    return list(kinds.values())


def _latent_backend(
    config: EngineConfig, device: torch.device, latent: LatentShape
) -> LatentBackend:
    """Returns the backend of latents. In deterministic mode all requests stay absorbed: the two
    forms round differently, and which one is faster depends on how a prompt is cut into steps."""
    if config.device.deterministic:
        logger.info("attention of latents: absorbed alone")
        return LatentBackend(fixed_order=True)
    dtype, key = getattr(torch, config.model.dtype), latent.nope + latent.rope
    package = None
    if config.device.attention_backend == "auto":
        package = FlashRagged.package(dtype, key, latent.value, device)
    if package is not None:
        try:
            ragged = FlashRagged(package)
        except (ImportError, OSError) as error:
            logger.warning(_NOT_LOADED, package, error)
        else:
            logger.info("attention of latents: expanded FlashAttention 3, absorbed Triton")
            return LatentBackend(shape=latent, ragged=ragged)
    logger.info("attention of latents: %s", "Triton" if is_gpu(device) else "torch")
    return LatentBackend(shape=latent)


def _check_fp8_cache(device: torch.device) -> None:
    if is_gpu(device) and not has_e4m3(device):
        raise AttentionBackendError(
            f"{gpu_name(device)} has no instructions for FP8; choose bfloat16 as "
            "kv_cache_dtype (FP8 needs compute capability 8.9: Ada, Hopper or later)"
        )


def _dense_prefill(
    dtype: torch.dtype, heads: HeadSizes, device: torch.device, *, has_sinks: bool
) -> DensePrefill | None:
    """Returns the fastest that is there. A library that is installed and does not load is no
    reason not to start: it may have been built for another torch."""
    sizes = dtype, heads.head_dim, device, heads.v_head_dim
    package = FlashPrefill.package(*sizes)
    if package is not None:
        try:
            return FlashPrefill(package, whole_prompts(device).flash_tokens)
        except (ImportError, OSError) as error:
            logger.warning(_NOT_LOADED, package, error)
    if has_sinks and not CudnnPrefill.has_sinks:
        return None
    if not CudnnPrefill.is_available(*sizes):
        return None
    return CudnnPrefill(whole_prompts(device).cudnn_tokens)


def _check_flash_attention(dtype: torch.dtype, heads: HeadSizes, device: torch.device) -> None:
    if not flash_attention.is_installed():
        raise AttentionBackendError(
            f"attention_backend flash-attn needs the package {flash_attention.PACKAGE} "
            "(FlashAttention 3 for Hopper); install it, or choose auto or triton"
        )
    if not flash_attention.is_available(dtype, heads.head_dim, device, heads.v_head_dim):
        raise AttentionBackendError(
            f"FlashAttention 3 does not compute {dtype} with heads of {heads.head_dim} on "
            f"{device}; choose auto or triton as attention_backend"
        )
    try:
        importlib.import_module(flash_attention.PACKAGE)
    except (ImportError, OSError) as error:
        raise AttentionBackendError(
            f"{flash_attention.PACKAGE} is installed but does not load: {error}; install it for "
            f"torch {torch.__version__}, or choose auto or triton as attention_backend"
        ) from error
