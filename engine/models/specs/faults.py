"""Finds numbers in a config.json that no model can have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from engine.head_sizes import HeadSizes
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField


def number_faults(file: ConfigFile) -> Iterator[UnsupportedField]:
    """Yields numbers that JSON of Python may hold and no model can."""
    for name in file.__struct_fields__:
        value = getattr(file, name)
        if isinstance(value, float) and not math.isfinite(value):
            yield UnsupportedField(name, f"the number {value}")


def size_faults(file: ConfigFile, has_dense_layers: bool) -> Iterator[UnsupportedField]:
    sizes = {
        "vocab_size": file.vocab_size,
        "hidden_size": file.hidden_size,
        "intermediate_size": file.intermediate_size if has_dense_layers else 1,
        "num_hidden_layers": file.num_hidden_layers,
        "num_attention_heads": file.num_attention_heads,
        "max_position_embeddings": file.max_position_embeddings,
        "num_key_value_heads": file.num_kv_heads,
    }
    for name, size in sizes.items():
        if size < 1:
            yield UnsupportedField(name, "a size below 1")
    heads, kv_heads = file.num_attention_heads, file.num_kv_heads
    if heads % kv_heads:
        yield UnsupportedField(
            "num_key_value_heads", f"{heads} heads over {kv_heads} key/value heads"
        )


def head_faults(layers: Iterable[HeadSizes]) -> Iterator[UnsupportedField]:
    """Yields what is wrong with the heads of any layer, where layers differ."""
    for heads in dict.fromkeys(layers):
        queries, kv_heads = heads.num_heads, heads.num_kv_heads
        if min(queries, kv_heads, heads.head_dim, heads.v_head_dim) < 1:
            yield UnsupportedField("num_key_value_heads", "a size below 1 in some layers")
        elif queries % kv_heads:
            yield UnsupportedField(
                "num_key_value_heads", f"{queries} heads over {kv_heads} in some layers"
            )


def rope_faults(file: ConfigFile) -> Iterator[UnsupportedField]:
    """Yields two kinds of scaling that contradict each other."""
    older, newer = file.rope_scaling, file.rope_parameters
    is_flat = newer is not None and newer.full_attention is None
    if older and newer and is_flat and older.scales and older.kind != newer.kind:
        yield UnsupportedField(
            "rope_scaling",
            f"rope_type {older.kind!r} beside {newer.kind!r} in rope_parameters",
            "write the scaling into rope_parameters, with its rope_theta",
        )
