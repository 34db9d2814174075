"""Names what the KV of few families depends on: nodes of unlike models must not exchange it."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from engine.config import ModelConfig
from engine.rope import Rotary

_FIELDS = (
    "window_layers", "window_rotary", "unrotated_layers", "query_scale", "stream_scale",
    "after_eps", "attention_scale", "attention_softcap", "experts", "latent", "linear", "kda",
    "mamba", "conv", "unit_scales",
)  # fmt: skip
_MORE_FIELDS = (
    "shared_projections", "value_scale", "first_sharing_layer", "wide_layers", "layer_input_size",
    "lightning", "norm_factor",
)  # fmt: skip


def rare_facts(spec: msgspec.Struct, rotary: Rotary, model: ModelConfig) -> tuple[Any, ...]:
    """Returns what differs from its default, in a fixed order: nodes of an older release know no
    more."""
    defaults = _defaults_of(type(spec))
    facts = (
        ("rotary_dim", rotary.dim, model.head_dim),
        ("interleaved", rotary.interleaved, False),
        *((name, getattr(spec, name), defaults[name]) for name in _FIELDS),
        ("layer_heads", model.layer_heads, ()),
        *((name, getattr(spec, name), defaults[name]) for name in _MORE_FIELDS),
    )
    return tuple((name, value) for name, value, default in facts if value != default)


@cache
def _defaults_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(kind)}
