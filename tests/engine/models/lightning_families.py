"""Families with lightning attention. transformers has MiniMax-Text-01; of Ring it has everything
else, so there the layers are written down here, as sums over all tokens before one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    SarvamMoEConfig,
)

from tests.engine.models.family import LATENT, YARN, Family

_GROUPS = 2


class _Lightning(nn.Module):
    """Computes what layers of Ring 2.5 do, without a state. `names`: of its projections of
    queries, keys and values; or of one for all. Half of each head, `dim`, rotates."""

    def __init__(
        self, config: PretrainedConfig, layer: int, names: tuple[str, ...], dim: int
    ) -> None:
        super().__init__()
        size, self.heads, self.names = config.hidden_size, config.num_attention_heads, names
        self.dim, inner, eps = dim, self.heads * dim, config.rms_norm_eps
        for name in names:
            setattr(self, name, nn.Linear(size, 3 * inner // len(names), bias=False))
        self.g_proj = nn.Linear(size, inner, bias=False)
        self.o_proj = nn.Linear(inner, size, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim, eps) for _ in range(2))
        self.g_norm = nn.RMSNorm(inner, eps)
        pace = 1 - layer / (config.num_hidden_layers - 1) + 1e-5
        self.slopes = [pace * 2 ** (-8 * (i + 1) / self.heads) for i in range(self.heads)]

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        x, (cos, sin) = hidden_states, position_embeddings
        projected = torch.cat([getattr(self, name)(x) for name in self.names], dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
            for part in projected.chunk(3, dim=-1)
        )
        q, k = (_turned(norm(one), cos, sin) for norm, one in ((self.q_norm, q), (self.k_norm, k)))
        place = torch.arange(x.shape[1])
        since = (place[:, None] - place).clamp(min=0)
        decays = torch.exp(-torch.tensor(self.slopes)[:, None, None] * since).tril()
        read = ((q @ k.transpose(2, 3)) * self.dim**-0.5 * decays) @ v
        read = read.transpose(1, 2).flatten(2)
        parts = read.unflatten(-1, (_GROUPS, -1))
        normed = F.rms_norm(parts, parts.shape[-1:], None, self.g_norm.eps).flatten(2)
        return self.o_proj(normed * self.g_norm.weight * self.g_proj(x).sigmoid()), None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, staying = x.chunk(2, dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return torch.cat((turned, staying), dim=-1)


class _WithLightning(PreTrainedModel):
    """Puts such layers into a model of transformers; there is no cache."""

    names: tuple[str, ...]
    dim: int

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            if index % 3 < 2 and index < 3:
                layer.self_attn = _Lightning(config, index, self.names, self.dim)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, use_cache=False, **kwargs)


class RingForCausalLM(_WithLightning, DeepseekV3ForCausalLM):
    """Ring 2.5."""

    names = ("query_key_value",)
    dim = 8


class RingLinearForCausalLM(_WithLightning, Glm4MoeForCausalLM):
    """Ring-linear 2.0, whose projections transformers joins as it writes Sarvam's."""

    names = "q_proj", "k_proj", "v_proj"
    dim = 16


_GROUPED = {"layer_group_size": 3, "group_norm_size": _GROUPS, "partial_rotary_factor": 0.5}
_RING = {"num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": 0, "n_shared_experts": 1}

_MINIMAX = {
    "num_hidden_layers": 4, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "block_size": 32, "bos_token_id": 0, "eos_token_id": 0,
    "full_attn_alpha_factor": 1.7, "linear_attn_alpha_factor": 1.7, "mlp_alpha_factor": 1.7,
}  # fmt: skip

LIGHTNING_FAMILIES = {
    "minimax_text": Family(MiniMaxForCausalLM, MiniMaxConfig, _MINIMAX),
    "ring2_5": Family(
        RingForCausalLM,
        DeepseekV3Config,
        {
            **LATENT,
            **_RING,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 4,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        published={
            "architectures": ["BailingMoeV2_5ForCausalLM"],
            **_GROUPED,
            "head_dim": RingForCausalLM.dim,
            "score_function": "sigmoid",
            "linear_silu": False,
        },
    ),
    "ring_linear": Family(
        RingLinearForCausalLM,
        SarvamMoEConfig,
        {
            **_RING,
            "head_dim": RingLinearForCausalLM.dim,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        published={
            "architectures": ["BailingMoeLinearV2ForCausalLM"],
            **_GROUPED,
            "num_experts": 8,
            "num_shared_experts": 1,
        },
    ),
}
