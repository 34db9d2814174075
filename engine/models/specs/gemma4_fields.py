"""Reads what config.json of Gemma 4 says in fields of its own."""

from __future__ import annotations

import msgspec

from engine.models.config.config_file import ConfigFile, RopeFields
from engine.models.specs.base import UnsupportedField

FULL, WINDOW = "full_attention", "sliding_attention"
FULL_HEAD_DIM = 512
_ROPE = RopeFields(
    full_attention=RopeFields(
        rope_type="proportional", rope_theta=1_000_000.0, partial_rotary_factor=0.25
    ),
    sliding_attention=RopeFields(rope_theta=10_000.0),
)
"""transformers takes it where config.json says nothing."""


def with_common_names(file: ConfigFile, every: int) -> ConfigFile:
    """Returns config.json with what is said in fields of Gemma's own, or left out, in common ones.
    One of `every` layers sees everything where it does not say. Raises `UnsupportedField`."""
    kinds = file.layer_types or [
        WINDOW if (i + 1) % every else FULL for i in range(file.num_hidden_layers)
    ]
    return msgspec.structs.replace(
        file,
        # As in transformers the last layer sees everything, whatever is said.
        layer_types=[*kinds[:-1], FULL],
        rope_parameters=file.rope_parameters or _ROPE,
        num_experts_per_tok=file.top_k_experts,
        num_global_key_value_heads=_of_full_layers(file, kinds, "num_key_value_heads")
        or (file.num_global_key_value_heads if file.attention_k_eq_v else None),
        global_head_dim=_of_full_layers(file, kinds, "head_dim")
        or file.global_head_dim
        or FULL_HEAD_DIM,
    )


def _of_full_layers(file: ConfigFile, kinds: list[str], name: str) -> int | None:
    """Returns what transformers writes of layers that see everything; None: nothing. Raises
    `UnsupportedField` where other layers, or some of these alone, have a number of their own."""
    changes = file.per_layer_config or {}
    found = {
        number: fields[name] for number, fields in changes.items() if fields.get(name) is not None
    }
    numbers = set(found.values())
    full = {str(i) for i, kind in enumerate(kinds) if kind == FULL}
    if not found:
        return None
    (number,) = numbers if len(numbers) == 1 else (None,)
    if set(found) != full or not isinstance(number, int):
        raise UnsupportedField("per_layer_config", f"{name} of layers of one kind that differ")
    return number
