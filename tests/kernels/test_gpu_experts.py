"""Experts and routers on a CUDA device, against float64."""

from __future__ import annotations

import kernel_checks as check
import pytest
import torch
from gpu_fixtures import halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", check.ROUTERS)
@pytest.mark.parametrize("num_experts", [16, 64, 128, 256])
def test_routers(name: str, num_experts: int) -> None:
    check.route_tokens(ops.route_tokens, name, num_experts, "cuda")


def test_routers_of_ranks_with_some_experts() -> None:
    check.route_to_own_experts(ops.route_tokens, "cuda")


def test_kernels_that_let_the_next_one_begin_late() -> None:
    check.route_tokens(ops.route_tokens, "gpt_oss", 128, "cuda")
    check.rms_norm(ops.rms_norm, 3, 2880, torch.bfloat16, "cuda")
    check.fused_add_rms_norm(ops.fused_add_rms_norm, 3, 2880, torch.bfloat16, "cuda")


@halves
@pytest.mark.parametrize("sizes", [(1, 4, 2880), (300, 8, 2048), (2100, 4, 2880), (5, 6, 200)])
def test_sums_of_experts_that_are_normed(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    check.pairs_add_rms_norm(ops.pairs_add_rms_norm, sizes, dtype, "cuda")


@halves
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 33, 300])
@pytest.mark.parametrize("sizes", [(8, 128, 2048, 768), (2, 8, 1024, 1792), (6, 60, 256, 200)])
def test_experts(dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int, int, int]) -> None:
    check.fused_experts(ops.fused_experts, (num_tokens, *sizes), dtype, "cuda")


@halves
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize(
    ("sizes", "gate"),
    [((8, 256, 2048, 512, 512), None), ((6, 128, 2688, 1856, 3712), "squared")],
)
def test_a_shared_expert_beside_others(
    dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int, int, int, int], gate: str | None
) -> None:
    """Sizes of Qwen3.5-35B-A3B and of Nemotron 3 Nano, of which the second has no whole tiles."""
    form = None if gate is None else check.GATES[gate]
    check.experts_beside(ops.experts_beside, (num_tokens, *sizes), dtype, "cuda", gate=form)


@halves
@pytest.mark.parametrize("num_tokens", [1, 16, 70, 2100])
@pytest.mark.parametrize(
    ("sizes", "gate"),
    [
        ((4, 32, 2880, 2880), "clamped"),
        ((4, 128, 2880, 1440), "clamped"),
        ((4, 32, 320, 360), "clamped"),
        ((8, 128, 2816, 704), "gelu"),
        ((8, 64, 4096, 320), "limited"),
    ],
)
def test_experts_with_biases_and_other_gates(
    dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int, int, int], gate: str
) -> None:
    form = check.GATES[gate]
    check.fused_experts(ops.fused_experts, (num_tokens, *sizes), dtype, "cuda", gate=form)
