"""Kernels of the indexer and of sparse latent attention in Triton's interpreter, as
`interpreted_layers`."""

from __future__ import annotations

import block_sparse_checks as blocks
import pytest
import sparse_checks as check
import torch
from interpreted_fixtures import remembers, seeded  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.attention import block_scores, index_select, index_topk
from tandem_kernels.attention.block_choice import BlockChoice

RAGGED = [5, 70, 0, 33, 20], [1, 1, 1, 7, 20]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of tens of tokens have several tiles, and blocks of scores."""
    monkeypatch.setattr(index_topk, "_TILE", 16)
    monkeypatch.setattr(index_select, "_BLOCK", 32)


@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float32, False), (torch.float16, True)])
def test_queries_and_keys(dtype: torch.dtype, fp8: bool) -> None:
    check.index_rope_and_cache(ops.index_rope_and_cache.kernel, (18, 32, 8), dtype, fp8=fp8)


def test_keys_alone_are_those_beside_queries() -> None:
    """A rank makes queries for the tokens that it chooses for, and keys of all."""
    check.index_keys_alone(ops.index_rope_and_cache.kernel, (18, 32, 8))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scores_at_once", [1 << 20, 1])
def test_choice_of_prompts(
    ties: bool, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_topk, "_SCORES_AT_ONCE", scores_at_once)
    check.index_topk(ops.index_topk.kernel, RAGGED, (3, 16, 12), fp8=False, ties=ties)


def test_choice_where_requests_have_no_tokens_and_tokens_no_context() -> None:
    """As in the runs of a rank that chooses for some tokens of a step."""
    lengths = [9, 70, 0, 33, 40, 0], [0, 20, 3, 0, 5, 6]
    check.index_topk(ops.index_topk.kernel, lengths, (3, 16, 12), fp8=False, ties=True)


@pytest.mark.parametrize("query_len", [1, 3])
def test_choice_of_decodes(query_len: int) -> None:
    lengths = [90, 3, 0, 45], [query_len] * 4
    check.index_topk(
        ops.index_topk.kernel, lengths, (3, 16, 12), fp8=False, ties=True, num_decodes=4
    )


@pytest.mark.parametrize("lengths", [([90, 3, 0, 45], [1] * 4), RAGGED])
def test_choice_of_parts_of_rows(lengths: check.Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores lie in several parts, and some parts have nothing."""
    monkeypatch.setattr(index_select, "_BLOCK", 16)
    monkeypatch.setattr(index_select, "_PROGRAMS_PER_SM", 400)
    check.index_topk(ops.index_topk.kernel, lengths, (3, 16, 12), fp8=False, ties=True)


@pytest.mark.parametrize("programs", [1, 400])
def test_choice_from_rows_that_mislead(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are chosen from whole, and in parts."""
    monkeypatch.setattr(index_select, "_PROGRAMS_PER_SM", programs)
    check.highest_of_rows(index_select.select, 12, 180)


@pytest.mark.parametrize(
    ("lengths", "num_decodes"), [(RAGGED, 0), (([70, 9, 0, 33], [2, 2, 2, 2]), 4)]
)
@pytest.mark.parametrize("fixed_order", [False, True])
def test_attention_to_chosen_tokens(
    lengths: check.Lengths, num_decodes: int, fixed_order: bool
) -> None:
    check.sparse_latent_attention(
        ops.sparse_latent_attention.kernel,
        lengths,
        (5, 24, 8, 40),
        torch.float32,
        num_decodes=num_decodes,
        fixed_order=fixed_order,
    )


@pytest.mark.parametrize(
    ("lengths", "causal"), [(([20, 3, 40], [90, 3, 133]), True), (([20, 3, 5], [70, 30, 1]), False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_to_chosen_keys(lengths: check.Lengths, causal: bool, dtype: torch.dtype) -> None:
    check.attention_to_chosen_keys(
        ops.ragged_attention.kernel, ops.chosen_bits.kernel, lengths, (2, 24, 12, 50), dtype,
        causal=causal,
    )  # fmt: skip


def test_choice_does_not_depend_on_what_else_is_there() -> None:
    check.index_topk_is_invariant(ops.index_topk.kernel, (70, 9), (3, 16, 20), fp8=False)


@pytest.mark.parametrize(
    ("lengths", "drafts"),
    [(RAGGED, 0), (([90, 3, 0, 45], [3] * 4), 3), (([90, 0, 45], [1] * 3), 1)],
)
@pytest.mark.parametrize(
    ("choice", "page"), [(BlockChoice(16, 2, 1), 8), (BlockChoice(8, 3, 2), 16)]
)
def test_choice_of_blocks(
    lengths: check.Lengths, drafts: int, choice: BlockChoice, page: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Blocks of several pages, and pages of several blocks; several turns."""
    monkeypatch.setattr(block_scores, "_SCORES_AT_ONCE", 128)
    monkeypatch.setattr(block_scores, "_ROWS", 8)
    op = ops.choose_blocks.kernel
    blocks.choose_blocks(op, lengths, (2, 16), choice, block_size=page, drafts=drafts)


@pytest.mark.parametrize(
    ("lengths", "drafts"),
    [(RAGGED, 0), (([70, 9, 0, 33], [2] * 4), 2), (([90, 0, 45], [1] * 3), 1)],
)
@pytest.mark.parametrize(
    ("page", "more"),
    [
        (8, {}), (32, {"value_dim": 8}), (32, {"fixed_order": True}), (16, {"fp8": True}),
        (64, {"fp8": True, "value_dim": 24}),
    ],
)  # fmt: skip
def test_attention_to_chosen_blocks(
    lengths: check.Lengths, drafts: int, page: int, more: dict[str, object]
) -> None:
    op, choice = ops.block_sparse_attention.kernel, BlockChoice(16, 3, 1)
    shape = {"block_size": page, "drafts": drafts, **more}
    blocks.block_sparse_attention(op, lengths, (2, 3, 16), choice, torch.float32, **shape)
