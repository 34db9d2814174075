"""The bench of experts inside steps keeps what a layer was given, and counts its tiles."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.engine.expert_steps import kept_calls, tiles_of
from engine.layers.sparse_mlp import Experts


class Doubling(Experts):
    def __init__(self) -> None:
        nn.Module.__init__(self)

    class method:
        @staticmethod
        def apply(layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            return x.mul_(2)


def test_tiles_are_those_that_have_rows() -> None:
    chosen = torch.tensor([[0, 3], [0, 1], [0, 3], [-1, -1]], dtype=torch.int32)
    assert tiles_of(chosen, 5, 1) == 6
    assert tiles_of(chosen, 5, 2) == 2 + 1 + 1
    assert tiles_of(chosen, 5, 80) == 3


def test_calls_of_steps_of_one_size_are_kept_once_a_layer() -> None:
    layers = Doubling(), Doubling()
    of = torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    with kept_calls(4) as calls:
        for num_tokens in (3, 4, 4):
            for layer in layers:
                layer(torch.full((num_tokens, 8), 5.0), *of)
    assert [call.layer for call in calls] == list(layers)
    assert all(torch.equal(call.x, torch.full((4, 8), 5.0)) for call in calls), "as it was before"
    layers[0](torch.ones(4, 8), *of)
    assert len(calls) == 2
