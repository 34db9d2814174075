"""Gate and up projection of many rows: when they are one product with the activation."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from engine.distributed import TensorParallelGroup
from engine.layers.linear import GateUpParallelLinear
from engine.layers.shard import Shard
from tandem_kernels import gated_shapes, ops

MANY = 40


@pytest.fixture
def layer() -> GateUpParallelLinear:
    group, device = TensorParallelGroup(0, 1), torch.device("cpu")
    layer = GateUpParallelLinear(256, 128, Shard(group, torch.bfloat16, device, gated_rows=MANY))
    torch.manual_seed(5)
    layer.weight.normal_(std=0.1)
    return layer


@pytest.mark.parametrize(
    ("rows", "gated_rows", "together"),
    [(MANY, MANY, True), (MANY + 1, MANY, True), (MANY - 1, MANY, False), (MANY, 0, False)],
)
def test_from_so_many_rows_on(
    layer: GateUpParallelLinear,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    gated_rows: int,
    together: bool,
) -> None:
    own = Mock(side_effect=ops.gated_linear)
    monkeypatch.setattr(ops, "gated_linear", own)
    layer.gated_rows = gated_rows
    x = torch.randn(rows, 256).bfloat16()
    assert torch.equal(layer(x), ops.silu_and_mul(x @ layer.weight.t()))
    assert own.called == together


def test_shapes_that_the_kernel_computes() -> None:
    x, weight = torch.zeros(3, 512).bfloat16(), torch.zeros(256, 512).bfloat16()
    assert gated_shapes.takes(x, weight)
    assert gated_shapes.takes(x[:, 256:], weight[:, :256])
    assert not gated_shapes.takes(x[:0], weight)
    assert not gated_shapes.takes(x.float(), weight.float())
    assert not gated_shapes.takes(x, torch.zeros(384, 512).bfloat16())
    assert not gated_shapes.takes(x[:, :320], torch.zeros(256, 320).bfloat16()[:, :310])
    assert not gated_shapes.takes(x[:, 1:], weight[:, 1:])
