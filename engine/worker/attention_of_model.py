"""Asks for the attention backend that fits a model's spec."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.layers.attention.backend import AttentionBackend
from engine.layers.attention.selection import choose_attention
from engine.models.registry import spec_of


def attention_of(
    config: EngineConfig, device: torch.device, recorded_tokens: int
) -> AttentionBackend:
    """Returns the backend that the model, the settings and the device ask for.

    Args:
        recorded_tokens: The tokens of the largest step with prompts that is a CUDA graph.
    """
    spec = spec_of(config.model)
    return choose_attention(
        config,
        device,
        rare_attention=spec.rare_attention,
        has_sinks=spec.has_sinks,
        latent=spec.latent_shape,
        recorded_tokens=recorded_tokens,
    )
