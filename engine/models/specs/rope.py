"""The rotary settings of config.json, read into a scaling."""

from __future__ import annotations

import math

from engine.models.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.rope import AnyRopeScaling, LongRope, RopeScaling


def read_llama3_or_plain(file: ConfigFile) -> AnyRopeScaling | None:
    """Returns Llama 3's scaling, or None for plain rotary embedding.

    Raises:
        UnsupportedField: The kind is another one, or a number of it is missing.
    """
    rope = file.rope
    if rope.kind == "default":
        return None
    if rope.kind != "llama3":
        raise UnsupportedField("rope_parameters", f"rope_type {rope.kind!r}")
    if (
        rope.factor is None
        or rope.low_freq_factor is None
        or rope.high_freq_factor is None
        or rope.original_max_position_embeddings is None
    ):
        raise UnsupportedField(
            "rope_parameters", "rope_type 'llama3' without all of its four numbers"
        )
    return RopeScaling(
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_position_embeddings=rope.original_max_position_embeddings,
    )


def read_longrope(file: ConfigFile, head_dim: int, max_model_len: int) -> LongRope:
    """Returns the short factors where no sequence grows beyond the original context, else the long
    ones for all: cached keys are rotated once, however long their sequence becomes.

    Raises:
        UnsupportedField: Factors are missing, or not as many as a head has pairs.
    """
    rope = file.rope
    original = rope.original_max_position_embeddings or file.original_max_position_embeddings
    if original is None:
        original = file.max_position_embeddings
    name = "long_factor" if max_model_len > original else "short_factor"
    factors = rope.long_factor if max_model_len > original else rope.short_factor
    if factors is None or len(factors) != head_dim // 2:
        raise UnsupportedField(
            "rope_parameters", f"rope_type 'longrope' without {head_dim // 2} numbers in {name}"
        )
    attention_factor = rope.attention_factor
    if attention_factor is None:
        factor = rope.factor or file.max_position_embeddings / original
        attention_factor = (
            math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        )
    return LongRope(factors=tuple(factors), attention_factor=attention_factor)
