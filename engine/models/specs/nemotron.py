"""Nemotron-H, and Nemotron 2 and 3: Nano and Super."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from engine.models.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import Activation, DenseSpec
from engine.models.specs.experts import ExpertNames, ExpertSpec, num_experts_of, number_of
from engine.models.specs.mamba import read_mamba

_LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*",
    "moe": "E", "mlp": "-",
}  # fmt: skip
_LATENTS = {"to_latent": "fc1_latent_proj", "from_latent": "fc2_latent_proj"}
_NAMES = ExpertNames(gate="", shared="shared_experts", **_LATENTS)


class NemotronHSpec(DenseSpec, frozen=True, kw_only=True):
    """Layers of Mamba 2, and few with attention that does not rotate. The checkpoint counts a
    feed-forward block as a layer of its own, and not each of the others has one; see
    `engine.models.joined_layers`. Blocks have no gate, routed experts may read latents."""

    activation: ClassVar[Activation] = "relu_squared"
    default_eps: ClassVar[float] = 1e-5
    other_weights: ClassVar[tuple[str, ...]] = ("mtp.",)
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^backbone\.", "model."),
        (r"^model\.embeddings?\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
        (r"\.mixer\.(in_proj|conv1d|norm|out_proj|A_log|D|dt_bias)\b", r".mamba.\1"),
        (r"\.mixer\.", ".mlp."),
    )

    written_names: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.(self_attn|mamba|mlp)(?=\.|$)", ".mixer"),
        (r"^model\.", "backbone."),
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        pattern = _pattern(file)
        mixers = [letter for letter in pattern if letter in "M*"]
        return msgspec.structs.replace(
            file,
            hybrid_override_pattern=pattern,
            num_hidden_layers=len(mixers),
            layer_types=["mamba" if one == "M" else "full_attention" for one in mixers],
            rms_norm_eps=file.layer_norm_epsilon,
            hidden_act=file.mlp_hidden_act,
            mamba_n_heads=file.mamba_num_heads,
            mamba_n_groups=file.n_groups,
            mamba_d_head=file.mamba_head_dim,
            mamba_d_state=file.ssm_state_size,
            mamba_d_conv=file.conv_kernel,
            mamba_conv_bias=file.use_conv_bias,
            mamba_proj_bias=file.mamba_proj_bias or file.use_bias,
        )

    @classmethod
    def may_have_dense_layers(cls, file: ConfigFile) -> bool:
        return "-" in (file.hybrid_override_pattern or "")

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        if isinstance(file.sliding_window, int):
            raise UnsupportedField("sliding_window", "attention over a sliding window")
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.mamba_hidden_act != "silu":
            raise UnsupportedField("mamba_hidden_act", repr(file.mamba_hidden_act))
        pattern = file.hybrid_override_pattern or ""
        numbers = tuple(found.start() for found in re.finditer(r"[M*]", pattern))
        behind = [pattern[number + 1 : number + 2] for number in numbers]
        dense = tuple(i for i, letter in enumerate(behind) if letter == "-")
        return {
            "mamba": read_mamba(file, cls.eps_of(file)),
            "unrotated_layers": tuple(range(len(numbers))),
            "stored_layers": numbers,
            "bare_layers": tuple(i for i, letter in enumerate(behind) if letter not in ("-", "E")),
            "experts": _experts(file, dense) if "E" in behind else None,
        }


def _pattern(file: ConfigFile) -> str:
    """Returns a letter for each layer that the checkpoint counts. Raises `UnsupportedField`."""
    field, kinds = "layers_block_type", file.layers_block_type or file.layer_types
    pattern = file.hybrid_override_pattern
    if pattern:
        field = "hybrid_override_pattern"
    else:
        pattern = "".join(_LETTERS.get(kind, "?") for kind in kinds or ())
    if not re.fullmatch(r"([M*][-E]?)+", pattern):
        raise UnsupportedField(field, f"{pattern!r}: a block behind no layer that mixes tokens")
    return pattern


def _experts(file: ConfigFile, dense: tuple[int, ...]) -> ExpertSpec:
    return ExpertSpec(
        count=num_experts_of(file),
        top_k=number_of(file, "num_experts_per_tok"),
        intermediate_size=number_of(file, "moe_intermediate_size"),
        renormalise=file.norm_topk_prob is not False,
        dense_layers=dense,
        shared_size=number_of(file, "moe_shared_expert_intermediate_size"),
        sigmoid=True,
        choice_bias=True,
        scaling=1.0 if file.routed_scaling_factor is None else file.routed_scaling_factor,
        num_groups=file.n_group or 1,
        top_groups=file.topk_group or 1,
        squared=True,
        latent_size=_latent_size(file),
        names=_NAMES,
    )


def _latent_size(file: ConfigFile) -> int:
    """Returns the numbers of a token that routed experts read; 0: as the model has. Raises
    `UnsupportedField`."""
    size = file.moe_latent_size or 0
    if size < 0:
        raise UnsupportedField("moe_latent_size", f"latents of {size} numbers")
    return size
