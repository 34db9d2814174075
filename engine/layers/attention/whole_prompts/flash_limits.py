"""Says what FlashAttention for everything cannot do, as far as settings and model tell: without
torch, so that a node is refused before it loads anything."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.errors import CannotStartError


class AttentionBackendError(CannotStartError):
    """This machine or model does not have the kernels that the setting wants."""


def check_wanted(config: EngineConfig, rare_attention: str) -> None:
    """Raises `AttentionBackendError` where the wanted backend cannot compute what is asked for.
    `rare_attention`: names what only our own kernels know of this model's attention."""
    if config.device.attention_backend != "flash-attn":
        return
    if config.cache.kv_scales is not None:
        raise AttentionBackendError(
            "attention_backend flash-attn does not read an FP8 KV cache; choose auto or triton, or "
            "bfloat16 as kv_cache_dtype"
        )
    groups = config.kv_layout.groups
    if any(group.window is not None for group in groups):
        rare_attention = "a sliding window"
    if any(group.is_state for group in groups):
        rare_attention = "pages that may hold a former state, whose bytes are no keys and values"
    if rare_attention:
        raise AttentionBackendError(
            f"attention_backend flash-attn does not have {rare_attention}, which "
            f"{config.model.architecture} needs; choose auto or triton"
        )
    if config.device.deterministic:
        raise AttentionBackendError(
            "attention_backend flash-attn has no deterministic mode: how it splits a context "
            "depends on what else runs; choose auto or triton, or leave out --deterministic"
        )
