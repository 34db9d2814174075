"""Reads what config.json of Step says in fields of its own."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.models.config.config_file import ConfigFile, RopeFields
from engine.models.specs.base import UnsupportedField

FULL, WINDOW = "full_attention", "sliding_attention"
_FIRST_SPARSE = 3
_THETA = 10_000.0


def with_common_names(file: ConfigFile) -> ConfigFile:
    """Returns config.json with common names for what Step calls otherwise. Lists by layer may go on
    behind the last one, with layers that predict ahead. Raises `UnsupportedField`."""
    count = file.num_hidden_layers
    kinds = _of_layers(file, "layer_types") or [FULL] * count
    shared = file.share_expert_dim or file.share_expert_dims
    return msgspec.structs.replace(
        file,
        layer_types=kinds,
        num_key_value_heads=file.num_attention_groups or file.num_key_value_heads,
        num_sliding_attention_heads=_sliding_heads(file),
        mlp_layer_types=_of_layers(file, "mlp_layer_types") or _mlp_kinds(file),
        rope_parameters=_rope(file, kinds),
        rope_bases=None,
        rope_scaling=None,
        partial_rotary_factor=None,
        num_experts=file.moe_num_experts or file.n_routed_experts,
        num_experts_per_tok=file.moe_top_k or file.num_experts_per_tok,
        share_expert_dim=shared,
    )


def limits_of(file: ConfigFile, name: str, ahead: int = 0) -> tuple[float, ...]:
    """Returns the limit of each layer, 0 where there is none, and of up to `ahead` layers behind
    the last one; none: no layer has one."""
    limits = tuple(limit or 0.0 for limit in _of_layers(file, name, ahead) or ())
    return limits if any(limits) else ()


def _of_layers(file: ConfigFile, name: str, ahead: int = 0) -> list[Any] | None:
    said: list[Any] | None = getattr(file, name)
    count = file.num_hidden_layers
    if said is not None and len(said) < count:
        raise UnsupportedField(name, f"{len(said)} kinds for {count} layers")
    return None if said is None else said[: count + ahead]


def _sliding_heads(file: ConfigFile) -> int | None:
    """Returns the query heads of layers with a window, wherever they are said."""
    other = file.attention_other_setting or {}
    groups = other.get("num_attention_groups", file.num_attention_groups)
    if groups != file.num_attention_groups or other.get("head_dim", file.head_dim) != file.head_dim:
        raise UnsupportedField("attention_other_setting", "KV heads or sizes that differ by layer")
    found = other.get("num_attention_heads", file.num_sliding_attention_heads)
    return found if isinstance(found, int) else None


def _mlp_kinds(file: ConfigFile) -> list[str]:
    said = file.moe_layers_enum
    if said is None:
        sparse = set(range(_FIRST_SPARSE, file.num_hidden_layers))
    else:
        try:
            items = said.split(",") if isinstance(said, str) else said
            sparse = {int(item) for item in items if str(item).strip()}
        except ValueError as error:
            raise UnsupportedField("moe_layers_enum", repr(said)) from error
    return ["sparse" if i in sparse else "dense" for i in range(file.num_hidden_layers)]


def _rope(file: ConfigFile, kinds: list[str]) -> RopeFields:
    """Returns how each kind of layers rotates; scaling is for those that see everything alone."""
    if (said := file.rope_parameters) is not None and (
        said.full_attention or said.sliding_attention
    ):
        return said
    parts = _of_layers(file, "partial_rotary_factors")
    bases = file.rope_bases
    if isinstance(bases, list) and len(bases) < len(kinds):
        raise UnsupportedField("rope_theta", f"{len(bases)} numbers for {len(kinds)} layers")

    def of_kind(kind: str, scaling: RopeFields) -> RopeFields | None:
        own = [i for i, one in enumerate(kinds) if one == kind]
        if not own:
            return None
        theta = {bases[i] for i in own} if isinstance(bases, list) else {bases or _THETA}
        part = {parts[i] for i in own} if parts else {1.0}
        if len(theta) > 1 or len(part) > 1:
            raise UnsupportedField("rope_theta", "layers of one kind that rotate differently")
        return msgspec.structs.replace(
            scaling, rope_theta=theta.pop(), partial_rotary_factor=part.pop()
        )

    scaling = file.rope_scaling or RopeFields()
    return RopeFields(
        full_attention=of_kind(FULL, scaling), sliding_attention=of_kind(WINDOW, RopeFields())
    )
