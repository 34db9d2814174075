"""OLMo Hybrid: three layers of four have the gated delta rule, the others attention."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import check_kinds
from engine.models.specs.dense import NormNames
from engine.models.specs.linear import read_linear
from engine.models.specs.olmo import Olmo2Spec
from engine.models.specs.states import MIXED_KINDS

_READ_EPS = 1e-5
"""Belongs to the norm of what is read of a state, whatever config.json says of the others."""


class OlmoHybridSpec(Olmo2Spec, frozen=True, kw_only=True):
    """OLMo 2, and layers with a state, whose norms stand in front of blocks. A token may take out
    more than is there, and no head rotates where config.json says that it has no base."""

    default_eps: ClassVar[float] = 1e-6
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        key_heads = file.linear_num_key_heads or file.num_attention_heads
        key_dim = file.linear_key_head_dim or int(0.75 * file.hidden_size / key_heads)
        return msgspec.structs.replace(
            file,
            linear_num_key_heads=key_heads,
            linear_num_value_heads=file.linear_num_value_heads or file.num_attention_heads,
            linear_key_head_dim=key_dim,
            linear_value_head_dim=file.linear_value_head_dim or 2 * key_dim,
            linear_conv_kernel_dim=file.linear_conv_kernel_dim or 4,
        )

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        check_kinds(file.layer_types, MIXED_KINDS)
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        doubles = file.linear_allow_neg_eigval
        says_none = file.rope_parameters is not None and file.rope_parameters.rope_theta is None
        rotates = file.rope_theta is not None or not says_none
        return {
            "linear": read_linear(
                file,
                is_split=True,
                is_apart=True,
                rate_scale=2.0 if doubles else 1.0,
                eps=_READ_EPS,
            ),
            "unrotated_layers": () if rotates else tuple(range(file.num_hidden_layers)),
        }

    def norms_of(self, layer: int) -> NormNames:
        assert self.linear is not None
        return NormNames() if layer in self.linear.layers else self.norms
