"""Nemotron-H, and Nemotron 2 and 3: Nano and Super."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.ahead import NEMOTRON_AHEAD, AheadNames
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import Activation, DenseSpec
from engine.models.specs.latent_experts import latent_experts
from engine.models.specs.mamba import read_mamba
from engine.rope import UNROTATED, Rotary

_LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*",
    "moe": "E", "mlp": "-",
}  # fmt: skip


class NemotronHSpec(DenseSpec, frozen=True, kw_only=True):
    """Layers of Mamba 2, and few with attention that does not rotate. The checkpoint counts a
    feed-forward block as a layer of its own, and not each of the others has one; see
    `engine.models.weights.joined_layers`. Blocks have no gate, routed experts may read latents."""

    activation: ClassVar[Activation] = "relu_squared"
    default_eps: ClassVar[float] = 1e-5
    other_weights: ClassVar[tuple[str, ...]] = ("mtp.",)
    ahead: ClassVar[AheadNames] = NEMOTRON_AHEAD
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        # The layer that predicts ahead is two, too.
        (r"^mtp\.layers\.0\.norm\.", "mtp.layers.0.input_layernorm."),
        (r"^mtp\.layers\.1\.norm\.", "mtp.layers.0.post_attention_layernorm."),
        (r"^mtp\.layers\.1\.mixer\.", "mtp.layers.0.mlp."),
        (r"^mtp\.layers\.1\.final_layernorm\.", "mtp.layers.0.final_layernorm."),
        (r"^backbone\.", "model."),
        (r"^model\.embeddings?\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
        (r"\.mixer\.(in_proj|conv1d|norm|out_proj|A_log|D|dt_bias)\b", r".mamba.\1"),
        (r"\.mixer\.", ".mlp."),
    )

    written_names: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^mtp\.layers\.0\.mlp(?=\.|$)", "mtp.layers.1.mixer"),
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

    def rotary_of(self, layer: int) -> Rotary:
        return UNROTATED

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
            "experts": latent_experts(file, dense) if "E" in behind else None,
            "num_extra_layers": _num_ahead(file),
        }


def _num_ahead(file: ConfigFile) -> int:
    """Returns the layers that predict ahead: one, with experts, whose drafts the next ones are."""
    kinds = [_LETTERS.get(kind, "?") for kind in file.mtp_layers_block_type or ()]
    said = file.mtp_hybrid_override_pattern or "".join(kinds)
    return min(1, file.num_nextn_predict_layers or 0) if said == "*E" else 0


def _pattern(file: ConfigFile) -> str:
    """Returns a letter for each layer that the checkpoint counts. Raises `UnsupportedField`."""
    kinds, pattern = file.layers_block_type or file.layer_types, file.hybrid_override_pattern
    field = "hybrid_override_pattern" if pattern else "layers_block_type"
    pattern = pattern or "".join(_LETTERS.get(kind, "?") for kind in kinds or ())
    if not re.fullmatch(r"([M*][-E]?)+", pattern):
        raise UnsupportedField(field, f"{pattern!r}: a block behind no layer that mixes tokens")
    return pattern
