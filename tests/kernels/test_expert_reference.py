"""Routing and experts in plain torch against float64, one pair at a time."""

from __future__ import annotations

import kernel_checks as check
import pytest
import torch

from tandem_kernels import ops


@pytest.mark.parametrize("name", check.ROUTERS)
@pytest.mark.parametrize("num_experts", [16, 64])
def test_routers(name: str, num_experts: int) -> None:
    torch.manual_seed(3)
    check.route_tokens(ops.route_tokens, name, num_experts)


def test_routers_of_ranks_with_some_experts() -> None:
    check.route_to_own_experts(ops.route_tokens)


def test_of_equal_scores_the_lowest_expert_is_chosen() -> None:
    logits = torch.zeros(1, 8)
    _, experts = ops.route_tokens(logits, torch.zeros(1, dtype=torch.int64), None, 3)
    assert experts.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_experts_that_are_normed(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    check.pairs_add_rms_norm(ops.pairs_add_rms_norm, (5, 3, 200), dtype)


@pytest.mark.parametrize("gate", check.GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts(dtype: torch.dtype, gate: str) -> None:
    torch.manual_seed(4)
    form = check.GATES[gate]
    check.fused_experts(ops.fused_experts, (13, 3, 8, 48, 24), dtype, gate=form)
