"""Ling and Ring 3: layers with Kimi Delta Attention, whose decays have a floor, before each layer
with gated latents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.ahead import BAILING_AHEAD, AheadNames
from engine.models.specs.base import UnsupportedField
from engine.models.specs.experts import SHARED_EXPERTS
from engine.models.specs.kimi_linear import KimiLinearSpec
from engine.models.specs.step_fields import limits_of

_NAMES = msgspec.structs.replace(SHARED_EXPERTS, choice_bias="gate.expert_bias")
_GROUP, _THETA = 6, 6_000_000.0


class BailingMoeV3Spec(KimiLinearSpec, frozen=True, kw_only=True):
    """Kimi Linear with names of its own, latents that rotate and have a gate for each head, and
    activations of some layers' experts that have limits. Lists of these may go on with the layer
    that predicts ahead."""

    default_eps: ClassVar[float] = 1e-6
    ahead: ClassVar[AheadNames] = BAILING_AHEAD
    num_dense: ClassVar[int | None] = 2
    default_scaling: ClassVar[float] = 2.5
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.gate\.e_score_correction_bias$", ".gate.expert_bias"),
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        every = file.layer_group_size or _GROUP
        kinds = [
            "linear_attention" if (i + 1) % every else "full_attention"
            for i in range(file.num_hidden_layers)
        ]
        file = msgspec.structs.replace(
            file,
            layer_types=file.layer_types or kinds,
            linear_num_heads=file.num_attention_heads,
            linear_head_dim=file.head_dim,
            linear_conv_kernel_dim=file.short_conv_kernel_size or 4,
            scoring_func=file.score_function,
            partial_rotary_factor=None,
            rope_bases=file.rope_bases or _THETA,
        )
        return super().renamed(file)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        more = super().read_more(file, max_model_len)
        experts, kda = more["experts"], more["kda"]
        shared = file.moe_shared_expert_intermediate_size
        count = file.num_shared_experts or file.n_shared_experts or 0
        ahead = file.num_nextn_predict_layers or file.num_mtp_layers or 0
        return {
            **more,
            "latent": msgspec.structs.replace(more["latent"], gated=True),
            "experts": msgspec.structs.replace(
                experts,
                names=_NAMES,
                shared_size=shared * count if shared else experts.shared_size,
                limits=limits_of(file, "expert_swiglu_limit_list", ahead),
                dense_limits=limits_of(file, "share_expert_swiglu_limit_list", ahead),
            ),
            "kda": msgspec.structs.replace(
                kda, is_narrow=False, floor=file.kda_lower_bound if file.kda_safe_gate else 0.0
            ),
            "unrotated_layers": (),
        }

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if not file.no_kda_lora:
            yield UnsupportedField("no_kda_lora", "gates that are projected in two steps")
        if file.linear_attention != "kda":
            yield UnsupportedField("linear_attention", repr(file.linear_attention))
        if (form := file.gated_attention_proj_granularity_type) != "head_wise":
            yield UnsupportedField("gated_attention_proj_granularity_type", repr(form))
        if file.use_qkv_bias or file.use_bias:
            yield UnsupportedField("use_qkv_bias", "biases beyond those of its family")
        if file.kda_safe_gate and not file.kda_lower_bound < 0:
            yield UnsupportedField("kda_lower_bound", f"decays not below {file.kda_lower_bound}")
