"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertNames, ExpertSpec, number_of


class Ernie45Spec(DenseSpec, frozen=True, kw_only=True):
    """Llama whose heads rotate in interleaved pairs."""

    default_eps: ClassVar[float] = 1e-5
    default_tied: ClassVar[bool] = True
    default_head_dim: ClassVar[int | None] = 128
    default_theta: ClassVar[float] = 500_000.0
    interleaved_rotary: ClassVar[bool] = True

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.use_bias:
            raise UnsupportedField("use_bias", "biases beyond those of its family")
        return {}


_NAMES = ExpertNames(shared="shared_experts", choice_bias="moe_statics.e_score_correction_bias")


class Ernie45MoeSpec(Ernie45Spec, frozen=True, kw_only=True):
    """ERNIE 4.5 with experts, chosen by softmax scores and a bias, beside shared ones."""

    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),
    )
    other_weights: ClassVar[tuple[str, ...]] = (
        "model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.",
        "model.mtp_linear_proj.",
    )  # fmt: skip

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        width, last = number_of(file, "moe_intermediate_size"), file.moe_layer_end_index
        last = file.num_hidden_layers - 1 if last == -1 else last
        with_experts = {
            i
            for i in range(file.moe_layer_start_index, last + 1)
            if (i + 1) % file.moe_layer_interval == 0
        }
        shared = 2 if file.moe_num_shared_experts is None else file.moe_num_shared_experts
        layers = range(file.num_hidden_layers)
        return {
            **super().read_more(file, max_model_len),
            "experts": ExpertSpec(
                count=number_of(file, "moe_num_experts"),
                top_k=number_of(file, "moe_k"),
                intermediate_size=width,
                renormalise=True,
                choice_bias=True,
                dense_layers=tuple(i for i in layers if i not in with_experts),
                shared_size=width * shared,
                names=_NAMES,
            ),
        }
