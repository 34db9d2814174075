"""Reads what DeepSeek-V4's config.json says in words of its own: the published ones, and those that
transformers writes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.models.config.config_file import DEFAULT_ROPE_THETA, ConfigFile, RopeFields
from engine.models.specs.ahead import AheadNames
from engine.models.specs.base import UnsupportedField
from engine.models.specs.experts import number_of

RENAMED = (
    (r"^(?:model\.)?embed\.weight$", "model.embed_tokens.weight"),
    (r"^head\.weight$", "lm_head.weight"),
    (r"^(layers|norm|mtp)\.", r"model.\1."),
    (r"^(?:model\.)?hc_head[._](?:hc_)?(fn|base|scale)$", r"model.hc_head_\1"),
    # transformers 5.24 writes it as if it were the norm of rows.
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.scale$", ".weight_scale_inv"),
)
"""Names of tensors, as published and as transformers writes them."""
AHEAD = AheadNames(
    layer="model.mtp.{}",
    embedding_norm="model.mtp.{}.enorm",
    feature_norm="model.mtp.{}.hnorm",
    projection="model.mtp.{}.h_proj",
    embedding_projection="model.mtp.{}.e_proj",
    norm="model.mtp.{}.norm",
    counts_on=False,
    dspark="model.mtp.0.main_proj.weight",
)
_ROPE_PART = 64 / 512


def with_common_names(file: ConfigFile) -> ConfigFile:
    """Returns config.json with its fields in those that others have."""
    values = file.quantization_config
    if values is not None and file.expert_dtype is not None:
        values = {"expert_dtype": file.expert_dtype, **values}
    return msgspec.structs.replace(
        file,
        quantization_config=values,
        qk_rope_head_dim=file.qk_rope_head_dim or _rope_dim(file),
        partial_rotary_factor=None,
        units=file.moe_intermediate_size or 0,
        rope_parameters=_rope_of_rows(file),
        rope_scaling=None,
        rope_bases=_main_theta(file),
    )


def _rope_dim(file: ConfigFile) -> int:
    part = file.partial_rotary_factor or _ROPE_PART
    return int((file.head_dim or 0) * part)


def _rope_of_rows(file: ConfigFile) -> RopeFields:
    """Returns how layers with rows rotate: YaRN, whose magnitude is left out."""
    said = file.rope
    nested = said.compress is not None
    rope = said.compress or said
    theta = (rope.rope_theta if nested else None) or file.compress_rope_theta or 160_000.0
    factor = 1.0 if rope.attention_factor is None else rope.attention_factor
    return msgspec.structs.replace(
        rope, rope_theta=theta, attention_factor=factor, partial_rotary_factor=None,
        main=None, compress=None,
    )  # fmt: skip


def _main_theta(file: ConfigFile) -> float:
    """Returns the base by which layers without rows rotate. Raises `UnsupportedField`."""
    main = file.rope.main or RopeFields()
    if main.scales:
        raise UnsupportedField("rope_parameters", f"rope_type {main.kind!r} of layers without rows")
    return main.rope_theta or file.rope_theta or DEFAULT_ROPE_THETA


def faults_of(file: ConfigFile) -> Iterator[UnsupportedField]:
    """Yields what it asks for and is not here."""
    if (file.scoring_func or "sqrtsoftplus") != "sqrtsoftplus":
        yield UnsupportedField("scoring_func", repr(file.scoring_func))
    if file.norm_topk_prob is False:
        yield UnsupportedField("norm_topk_prob", "weights of experts that are not divided")
    if file.num_kv_heads != 1:
        yield UnsupportedField("num_key_value_heads", f"{file.num_kv_heads} key/value heads")
    heads, groups = file.num_attention_heads, number_of(file, "o_groups")
    if heads % groups:
        yield UnsupportedField("o_groups", f"{groups} groups of {heads} heads")
    rope = file.qk_rope_head_dim or 0
    for name in ("head_dim", "index_head_dim"):
        size = number_of(file, name)
        if rope < 2 or rope % 2 or size < rope or size & (size - 1):
            yield UnsupportedField(name, f"{size} numbers, of which {rope} rotate")
    if (count := file.hc_mult) < 1 or count & (count - 1):
        yield UnsupportedField("hc_mult", f"{count} residual streams")
