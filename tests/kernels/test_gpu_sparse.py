"""The indexer and sparse latent attention on a CUDA device, against float64."""

from __future__ import annotations

import block_sparse_checks as blocks
import pytest
import sparse_checks as check
import torch
from gpu_fixtures import halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.attention import index_select
from tandem_kernels.attention.block_choice import BlockChoice

pytestmark = pytest.mark.gpu
LENGTHS = (
    ([1, 127, 0, 129, 1000], [1] * 5),
    ([5000], [1]),
    ([300, 700, 1500], [1, 129, 1400]),
)


@halves
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_queries_and_keys(dtype: torch.dtype, num_heads: int) -> None:
    sizes = num_heads, 128, 64
    check.index_rope_and_cache(ops.index_rope_and_cache, sizes, dtype, fp8=True, device="cuda")


@pytest.mark.parametrize("num_heads", [16, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("ties", [False, True])
def test_choice(lengths: check.Lengths, num_heads: int, ties: bool) -> None:
    decodes = len(lengths[0]) if max(lengths[1]) == 1 else 0
    check.index_topk(
        ops.index_topk, lengths, (num_heads, 128, 64), fp8=True, block_size=64,
        num_decodes=decodes, ties=ties, device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize(("top_k", "width"), [(12, 700), (2048, 40_000)])
def test_choice_from_rows_that_mislead(
    top_k: int, width: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are chosen from whole, and in parts."""
    monkeypatch.setattr(index_select, "_PROGRAMS_PER_SM", programs)
    check.highest_of_rows(index_select.select, top_k, width, "cuda")


def test_choice_does_not_depend_on_what_else_is_there() -> None:
    """The same request alone, in a batch, and cut into chunks chooses the same tokens."""
    check.index_topk_is_invariant(
        ops.index_topk, (3000, 40), (64, 128, 256), fp8=True, device="cuda"
    )


@halves
@pytest.mark.parametrize("num_heads", [8, 16, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("fixed_order", [False, True])
def test_attention_to_chosen_tokens(
    dtype: torch.dtype, num_heads: int, lengths: check.Lengths, fixed_order: bool
) -> None:
    check.sparse_latent_attention(
        ops.sparse_latent_attention, lengths, (num_heads, 512, 64, 256), dtype,
        fixed_order=fixed_order, device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize(
    "lengths", [([70, 9, 0, 33, 900], [2] * 5), ([2, 1, 0, 65, 64, 63, 128, 129], [1] * 8)]
)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_decodes_some_of_whose_parts_have_nothing(num_heads: int, lengths: check.Lengths) -> None:
    """A copy that such a part began and did not wait for would be written over its results."""
    check.sparse_latent_attention(
        ops.sparse_latent_attention, lengths, (num_heads, 512, 64, 256), torch.bfloat16,
        num_decodes=len(lengths[0]), device="cuda",
    )  # fmt: skip


@halves
@pytest.mark.parametrize(
    ("lengths", "causal"),
    [(([200, 3, 129], [1000, 3, 400]), True), (([64, 3, 100], [2500, 70, 1]), False)],
)
def test_attention_to_chosen_keys(dtype: torch.dtype, lengths: check.Lengths, causal: bool) -> None:
    check.attention_to_chosen_keys(
        ops.ragged_attention, ops.chosen_bits, lengths, (4, 192, 128, 300), dtype, causal=causal,
        device="cuda",
    )  # fmt: skip


def test_index_keys_in_e4m3_choose_nearly_the_same() -> None:
    torch.manual_seed(5)
    lengths = 8000, 2048
    ops_ = ops.index_rope_and_cache, ops.index_topk
    assert check.shared_choices(*ops_, (64, 128), lengths, device="cuda") > 0.9


BLOCKS = (
    (([1, 127, 0, 129, 1000], [1] * 5), 1),
    (([1000, 300], [3, 3]), 3),
    (([300, 500], [1, 70]), 0),
)
"""Lengths, and the query tokens of decodes, if all are."""


@halves
@pytest.mark.parametrize(("lengths", "drafts"), BLOCKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_choice_of_blocks(
    dtype: torch.dtype, groups: int, lengths: check.Lengths, drafts: int
) -> None:
    choice = BlockChoice(64, 3, 1)
    blocks.choose_blocks(
        ops.choose_blocks, lengths, (groups, 128), choice, block_size=16, drafts=drafts,
        dtype=dtype, device="cuda",
    )  # fmt: skip


@halves
@pytest.mark.parametrize(("lengths", "drafts"), BLOCKS)
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("more", [{}, {"fixed_order": True}, {"fp8": True}])
def test_attention_to_chosen_blocks(
    dtype: torch.dtype, page: int, lengths: check.Lengths, drafts: int, more: dict[str, bool]
) -> None:
    choice, shape = BlockChoice(128, 3, 1), {"block_size": page, "drafts": drafts}
    for num_kv_heads in (1, 4):
        blocks.block_sparse_attention(
            ops.block_sparse_attention, lengths, (num_kv_heads, 16, 128), choice, dtype,
            device="cuda", **shape, **more,
        )  # fmt: skip
