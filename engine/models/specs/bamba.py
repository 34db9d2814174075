"""Bamba, and Falcon-H1."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec, NormNames
from engine.models.specs.mamba import MambaSpec, read_mamba

_NUM_PARTS = 5
"""Parts of what a Mamba layer projects: z, x, B, C, dt."""


class BambaSpec(DenseSpec, frozen=True, kw_only=True):
    """Bamba: layers of Mamba 2, and few with attention, of which half of each head rotates."""

    default_eps: ClassVar[float] = 1e-5
    default_rotary_part: ClassVar[float | None] = 0.5
    mlp_module: ClassVar[str] = "feed_forward"
    norms: ClassVar[NormNames] = NormNames(before_mlp="pre_ff_layernorm")
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.final_layernorm\.", "model.norm."),
    )

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        attends = file.attn_layer_indices or ()
        layers = tuple(i for i in range(file.num_hidden_layers) if i not in attends)
        if not 0 < len(layers) < file.num_hidden_layers:
            raise UnsupportedField("attn_layer_indices", "layers of one kind alone")
        return {"mamba": read_mamba(file, cls.eps_of(file), layers=layers)}


class FalconH1Spec(BambaSpec, frozen=True, kw_only=True):
    """Falcon-H1: each layer has attention and Mamba 2 side by side, and multipliers everywhere."""

    default_rotary_part: ClassVar[float | None] = None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.projectors_bias:
            raise UnsupportedField("projectors_bias", "biases beyond those of its family")
        if file.mamba_rms_norm and file.mamba_norm_before_gate:
            raise UnsupportedField("mamba_norm_before_gate", "a norm in front of the gate")
        attended = file.attention_in_multiplier
        gate, down = _multipliers(file, "mlp_multipliers", 2)
        return {
            "mamba": _beside_attention(file, cls.eps_of(file)),
            "stream_scale": file.embedding_multiplier,
            "logit_scale": file.lm_head_multiplier,
            # Queries and keys are multiplied as their input is.
            "attention_scale": cls.head_dim_of(file) ** -0.5 * attended**2 * file.key_multiplier,
            "value_scale": attended * file.attention_out_multiplier,
            "unit_scales": None if gate == down == 1.0 else (gate, down),
        }


def _beside_attention(file: ConfigFile, eps: float) -> MambaSpec:
    scales = _multipliers(file, "ssm_multipliers", _NUM_PARTS)
    scales = tuple(file.ssm_in_multiplier * one for one in scales)
    return msgspec.structs.replace(
        read_mamba(file, eps, layers=tuple(range(file.num_hidden_layers))),
        beside_attention=True,
        is_normed=file.mamba_rms_norm,
        input_scales=() if set(scales) == {1.0} else scales,
        output_scale=file.ssm_out_multiplier,
    )


def _multipliers(file: ConfigFile, name: str, count: int) -> tuple[float, ...]:
    """Returns as many numbers as a field must have; 1 where it says nothing. Raises
    `UnsupportedField`."""
    said: list[float] = getattr(file, name) or [1.0] * count
    if len(said) != count:
        raise UnsupportedField(name, f"{len(said)} numbers, not {count}")
    return tuple(said)
