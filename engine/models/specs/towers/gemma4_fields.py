"""Reads what `vision_config` of Gemma 4 says."""

from __future__ import annotations

import msgspec

from engine.models.specs.towers.fields import TowerFile, is_odd_head, refuse


class AxialRope(msgspec.Struct):
    rope_type: str = "axial"
    rope_theta: float = 100.0


class Gemma4Tower(msgspec.Struct):
    """`vision_config`. What it leaves out is as transformers completes it."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool | None = False
    rope_parameters: AxialRope | None = None
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10_240
    use_clipped_linears: bool = False
    standardize: bool = False


def gemma4_tower(file: TowerFile) -> tuple[Gemma4Tower, AxialRope]:
    """Returns `vision_config`. Raises `UnsupportedField`."""
    tower = file.section(Gemma4Tower)
    rope = tower.rope_parameters or AxialRope()
    refuse(
        {
            "hidden_activation": tower.hidden_activation != "gelu_pytorch_tanh",
            "num_attention_heads": is_odd_head(tower.hidden_size, tower.num_attention_heads),
            "num_key_value_heads": tower.num_key_value_heads != tower.num_attention_heads,
            "head_dim": tower.head_dim * tower.num_attention_heads != tower.hidden_size,
            "attention_bias": bool(tower.attention_bias),
            "rope_parameters": rope.rope_type not in ("axial", "default"),
        },
        tower,
    )
    return tower, rope
