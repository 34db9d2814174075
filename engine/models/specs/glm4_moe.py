"""GLM-4.5 and 4.6."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertNames, ExpertSpec, num_experts_of, number_of


class Glm4MoeSpec(DenseSpec, frozen=True, kw_only=True):
    """GLM-4.5 and 4.6: experts chosen by sigmoid scores and a bias, behind a few dense layers."""

    default_attention_bias: ClassVar[bool] = True
    default_rotary_part: ClassVar[float | None] = 0.5

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        width = number_of(file, "moe_intermediate_size")
        return {
            "attention_bias": bool(file.attention_bias),
            "head_norm": "each" if file.use_qk_norm else "none",
            "experts": ExpertSpec(
                count=num_experts_of(file),
                top_k=number_of(file, "num_experts_per_tok"),
                intermediate_size=width,
                renormalise=file.norm_topk_prob is not False,
                dense_layers=tuple(range(min(file.first_k_dense_replace, file.num_hidden_layers))),
                shared_size=width * (file.n_shared_experts or 0),
                sigmoid=True,
                choice_bias=True,
                scaling=file.routed_scaling_factor,
                num_groups=file.n_group or 1,
                top_groups=file.topk_group or 1,
                names=ExpertNames(shared="shared_experts"),
            ),
        }
