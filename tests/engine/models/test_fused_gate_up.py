"""Gate and up projection of many rows: when they are one GEMM with the activation."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import GateUpParallelLinear
from engine.layers.shard import Shard
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops
from tandem_kernels.gemm import fused_gate_up_shapes

MANY = 40


def layer(fused_gate_up_rows: int) -> GateUpParallelLinear:
    policy = GemmPolicy(fused_gate_up_rows=fused_gate_up_rows)
    shard = Shard(ParallelPlace(range(1)), torch.bfloat16, torch.device("cpu"), policy)
    made = GateUpParallelLinear(256, 128, shard)
    torch.manual_seed(5)
    made.weight.normal_(std=0.1)
    return made


@pytest.mark.parametrize(
    ("rows", "fused_from", "together"),
    [(MANY, MANY, True), (MANY + 1, MANY, True), (MANY - 1, MANY, False), (MANY, 0, False)],
)
def test_from_so_many_rows_on(
    monkeypatch: pytest.MonkeyPatch, rows: int, fused_from: int, together: bool
) -> None:
    own = Mock(side_effect=ops.fused_gate_up)
    monkeypatch.setattr(ops, "fused_gate_up", own)
    made = layer(fused_from)
    x = torch.randn(rows, 256).bfloat16()
    assert torch.equal(made(x), ops.silu_and_mul(x @ made.weight.t()))
    assert own.called == together


def test_shapes_that_the_kernel_computes() -> None:
    x, weight = torch.zeros(3, 512).bfloat16(), torch.zeros(256, 512).bfloat16()
    assert fused_gate_up_shapes.takes(x, weight)
    assert fused_gate_up_shapes.takes(x[:, 256:], weight[:, :256])
    assert not fused_gate_up_shapes.takes(x[:0], weight)
    assert not fused_gate_up_shapes.takes(x.float(), weight.float())
    assert not fused_gate_up_shapes.takes(x, torch.zeros(384, 512).bfloat16())
    assert not fused_gate_up_shapes.takes(x[:, :320], torch.zeros(256, 320).bfloat16()[:, :310])
    assert not fused_gate_up_shapes.takes(x[:, 1:], weight[:, 1:])
