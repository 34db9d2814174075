"""Describes a mixture of experts, apart from the rest of its model."""

from __future__ import annotations

import msgspec


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's names inside a layer.

    Attributes:
        block: Of the whole block.
        router: Of the router's weight.
        gate, up, down: Of an expert's projections.
    """

    block: str = "mlp"
    router: str = "gate.weight"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


class ExpertSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a model.

    Attributes:
        count: Experts of a layer.
        top_k: Experts that a token goes to.
        intermediate_size: Units of one expert.
        renormalise: The weights of the chosen ones are divided by their sum.
        dense_layers: Layers that have an ordinary feed-forward block instead.
        shared_size: Units of the expert that every token goes to; 0: there is none.
        shared_gate: Its output is weighted by the token.
    """

    count: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    dense_layers: tuple[int, ...] = ()
    shared_size: int = 0
    shared_gate: bool = False
    names: ExpertNames = ExpertNames()
