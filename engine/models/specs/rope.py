"""The rotary settings of config.json, read into a `Rotary`."""

from __future__ import annotations

import math

from engine.models.config.config_file import ConfigFile, RopeFields
from engine.models.specs.base import UnsupportedField
from engine.rope import (
    AnyRopeScaling,
    LinearRope,
    LongRope,
    ProportionalRope,
    QueryScale,
    RopeScaling,
    Rotary,
    YarnRope,
)

_LONGROPE_NAMES = ("longrope", "su")
"""The second is that of early releases."""
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
_TELECHAT_MAGNITUDE = 0.7
"""TeleChat3's YaRN has 0.07 where others have 0.1."""


def read_rotary(
    file: ConfigFile,
    head_dim: int,
    max_model_len: int,
    *,
    rope: RopeFields | None = None,
    theta: float | None = None,
    partial: float = 1.0,
    interleaved: bool = False,
) -> Rotary:
    """Returns how a kind of layers rotates.

    Args:
        rope: The settings of this kind of layers; None: those of all.
        theta: The base where `rope` has none; None: config.json's own.
        partial: The part of a head that turns, where config.json does not say.
        interleaved: See `Rotary`.

    Raises:
        UnsupportedField: The kind of scaling is unknown, or a number of it is missing.
    """
    rope = rope or file.rope
    said = rope.partial_rotary_factor or file.partial_rotary_factor
    part = partial if said is None else said
    is_proportional = rope.kind == "proportional"
    dim = head_dim if is_proportional and 0 < part <= 1 else int(head_dim * part)
    if not 0 < dim <= head_dim or dim % 2:
        raise UnsupportedField("partial_rotary_factor", f"{part} of a head of {head_dim}")
    return Rotary(
        theta=rope.rope_theta or theta or file.base_frequency(),
        dim=dim,
        scaling=ProportionalRope(pairs=int(part * dim // 2), factor=rope.factor or 1.0)
        if is_proportional
        else _read_scaling(file, rope, dim, max_model_len),
        interleaved=interleaved,
    )


def _read_scaling(
    file: ConfigFile, rope: RopeFields, dim: int, max_model_len: int
) -> AnyRopeScaling | None:
    match rope.kind:
        case "default" | "dynamic" | "mrope":
            # Dynamic scaling begins behind the model's own positions, where no sequence gets. The
            # three positions of M-RoPE are one in text.
            return None
        case "linear":
            return LinearRope(factor=_number(rope, "factor"))
        case "llama3":
            return RopeScaling(
                factor=_number(rope, "factor"),
                low_freq_factor=_number(rope, "low_freq_factor"),
                high_freq_factor=_number(rope, "high_freq_factor"),
                original_max_position_embeddings=int(
                    _number(rope, "original_max_position_embeddings")
                ),
            )
        case "yarn" | "deepseek_yarn":
            return _read_yarn(file, rope)
        case "telechat3-yarn":
            return _read_yarn(file, rope, magnitude=_TELECHAT_MAGNITUDE)
        case kind if kind in _LONGROPE_NAMES:
            return _read_longrope(file, rope, dim, max_model_len)
        case kind:
            raise UnsupportedField("rope_parameters", f"rope_type {kind!r}")


def _number(rope: RopeFields, name: str) -> float:
    value: float | None = getattr(rope, name)
    if value is None:
        raise UnsupportedField("rope_parameters", f"rope_type {rope.kind!r} without its {name}")
    return value


def _original_length(file: ConfigFile, rope: RopeFields) -> int:
    return (
        rope.original_max_position_embeddings
        or file.original_max_position_embeddings
        or file.max_position_embeddings
    )


def _read_yarn(file: ConfigFile, rope: RopeFields, magnitude: float = 1.0) -> YarnRope:
    original = _original_length(file, rope)
    factor = rope.factor or file.max_position_embeddings / original
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = yarn_magnitude(factor, magnitude)
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = yarn_magnitude(factor, rope.mscale) / yarn_magnitude(
                factor, rope.mscale_all_dim
            )
    return YarnRope(
        factor=factor,
        beta_fast=rope.beta_fast or _BETA_FAST,
        beta_slow=rope.beta_slow or _BETA_SLOW,
        original_max_position_embeddings=original,
        truncate=rope.truncate,
        attention_factor=attention_factor,
    )


def read_query_scale(file: ConfigFile, max_model_len: int) -> QueryScale | None:
    """Returns how scores grow with the position; None: no sequence gets there, or they do not.
    Raises `UnsupportedField`."""
    rope = file.rope
    length = rope.original_max_position_embeddings or file.max_position_embeddings
    if not rope.llama_4_scaling_beta or max_model_len <= length:
        return None
    if length < 1:
        raise UnsupportedField("original_max_position_embeddings", "a size below 1")
    return QueryScale(beta=rope.llama_4_scaling_beta, length=length)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Returns what YaRN multiplies scores by, to the half, for a context `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_longrope(file: ConfigFile, rope: RopeFields, dim: int, max_model_len: int) -> LongRope:
    """Returns the short factors where no sequence grows beyond the original context, else the long
    ones for all: cached keys are rotated once, however long their sequence becomes.
    """
    original = _original_length(file, rope)
    name = "long_factor" if max_model_len > original else "short_factor"
    factors = rope.long_factor if max_model_len > original else rope.short_factor
    if factors is None or len(factors) != dim // 2:
        raise UnsupportedField(
            "rope_parameters", f"rope_type 'longrope' without {dim // 2} numbers in {name}"
        )
    attention_factor = rope.attention_factor
    if attention_factor is None:
        factor = rope.factor or file.max_position_embeddings / original
        attention_factor = (
            math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        )
    return LongRope(factors=tuple(factors), attention_factor=attention_factor)
