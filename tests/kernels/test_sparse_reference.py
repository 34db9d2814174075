"""The indexer and sparse latent attention in plain torch, against float64 and loops."""

from __future__ import annotations

import block_sparse_checks as blocks
import pytest
import sparse_checks as check
import torch

from tandem_kernels import ops
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.reference.index import hadamard, power_above, rounded

RAGGED = [5, 70, 0, 33, 20], [1, 1, 1, 7, 20]
fixed = pytest.mark.parametrize("fixed_order", [False, True])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)]
)
def test_queries_and_keys(dtype: torch.dtype, fp8: bool) -> None:
    check.index_rope_and_cache(ops.index_rope_and_cache, (3, 32, 8), dtype, fp8=fp8)


@fixed
@pytest.mark.parametrize("fp8", [False, True])
def test_the_highest_scores_are_chosen(fixed_order: bool, fp8: bool) -> None:
    sizes = 3, 32, 12
    check.index_topk(ops.index_topk, RAGGED, sizes, fp8=fp8, fixed_order=fixed_order)


@fixed
def test_of_equal_scores_the_first_are_chosen(fixed_order: bool) -> None:
    sizes = 2, 8, 12
    check.index_topk(ops.index_topk, RAGGED, sizes, fp8=False, ties=True, fixed_order=fixed_order)


@fixed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_to_chosen_tokens(dtype: torch.dtype, fixed_order: bool) -> None:
    sizes = 4, 24, 8, 12
    check.sparse_latent_attention(
        ops.sparse_latent_attention, RAGGED, sizes, dtype, fixed_order=fixed_order
    )


@fixed
@pytest.mark.parametrize("choice", [BlockChoice(8, 3, 1), BlockChoice(16, 2, 0)])
def test_the_best_blocks_are_chosen(choice: BlockChoice, fixed_order: bool) -> None:
    blocks.choose_blocks(ops.choose_blocks, RAGGED, (2, 8), choice, fixed_order=fixed_order)


@fixed
@pytest.mark.parametrize("fp8", [False, True])
def test_attention_to_chosen_blocks(fixed_order: bool, fp8: bool) -> None:
    op, choice = ops.block_sparse_attention, BlockChoice(8, 3, 1)
    dtype = torch.float32 if fp8 else torch.bfloat16
    more = {"fixed_order": fixed_order, "fp8": fp8, "value_dim": 12}
    blocks.block_sparse_attention(op, RAGGED, (2, 3, 16), choice, dtype, **more)


def test_turning_changes_no_product_and_scales_are_powers_of_two() -> None:
    """Rounding loses less than the 3 bits of e4m3 let expect, of every vector."""
    signs = hadamard(64)
    assert torch.equal(signs @ signs, 64 * torch.eye(64))
    x = torch.randn(200, 64) * torch.logspace(-3, 3, 200)[:, None]
    x[:, 3] *= 50
    numbers, scales = rounded(x)
    turned = x @ signs / 8
    error = (numbers.float() * scales[:, None] - turned).norm(dim=1) / turned.norm(dim=1)
    assert float(error.max()) < 0.04
    assert torch.equal(scales.log2(), scales.log2().round())
    assert torch.equal(power_above(torch.tensor([1.0, 1.5, 0.25])), torch.tensor([1.0, 2.0, 0.25]))


def test_index_keys_in_e4m3_choose_nearly_the_same() -> None:
    """At the sizes of V3.2, of 400 random tokens 64: by chance a sixth would be alike."""
    assert (
        check.shared_choices(ops.index_rope_and_cache, ops.index_topk, (64, 128), (400, 64)) > 0.9
    )
