"""Numbers layers of checkpoints that count feed-forward blocks as layers of their own (Nemotron-H).

pattern      M   E   M   *   E   M         M: Mamba 2, *: attention, E: experts, -: dense
stored       0   1   2   3   4   5
ours         0       1   2       3         each has what mixes tokens, and the block behind it
"""

from __future__ import annotations

import re

from engine.models.files.stored_tensors import StoredTensor

_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ONE_NORM, _OF_BLOCK = "input_layernorm.", "post_attention_layernorm."


def joined(
    tensors: dict[str, StoredTensor], stored_layers: tuple[int, ...]
) -> dict[str, StoredTensor]:
    """Returns the tensors by the names that they have where `stored_layers` are all layers, each
    with the block behind it, whose norm is then the second one."""
    return {joined_name(name, stored_layers): tensor for name, tensor in tensors.items()}


def joined_name(name: str, stored_layers: tuple[int, ...]) -> str:
    """Returns the name of a tensor or module by our numbers; one of no layer stays as it is."""
    if (found := _NAME.fullmatch(name)) is None:
        return name
    number, rest = int(found[1]), found[2]
    if number in stored_layers:
        return f"model.layers.{stored_layers.index(number)}.{rest}"
    if number - 1 in stored_layers:
        own = stored_layers.index(number - 1)
        return f"model.layers.{own}.{rest.replace(_ONE_NORM, _OF_BLOCK, 1)}"
    return name
