"""Kernels of the indexer and of sparse latent attention in Triton's interpreter, as
`interpreted_layers`."""

from __future__ import annotations

import pytest
import sparse_checks as check
import torch
from interpreted_fixtures import remembers, seeded  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.attention import index_select, index_topk

RAGGED = [5, 70, 0, 33, 20], [1, 1, 1, 7, 20]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of tens of tokens have several tiles, and blocks of scores."""
    monkeypatch.setattr(index_topk, "_TILE", 16)
    monkeypatch.setattr(index_select, "_BLOCK", 32)


@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float32, False), (torch.float16, True)])
def test_queries_and_keys(dtype: torch.dtype, fp8: bool) -> None:
    check.index_rope_and_cache(ops.index_rope_and_cache.kernel, (18, 32, 8), dtype, fp8=fp8)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scores_at_once", [1 << 20, 1])
def test_choice_of_prompts(
    ties: bool, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_topk, "_SCORES_AT_ONCE", scores_at_once)
    check.index_topk(ops.index_topk.kernel, RAGGED, (3, 16, 12), fp8=False, ties=ties)


@pytest.mark.parametrize("query_len", [1, 3])
def test_choice_of_decodes(query_len: int) -> None:
    lengths = [90, 3, 0, 45], [query_len] * 4
    check.index_topk(
        ops.index_topk.kernel, lengths, (3, 16, 12), fp8=False, ties=True, num_decodes=4
    )


@pytest.mark.parametrize("lengths", [([90, 3, 0, 45], [1] * 4), RAGGED])
def test_choice_of_parts_of_rows(lengths: check.Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores lie in several parts, and some parts have nothing."""
    monkeypatch.setattr(index_select, "_PART_BLOCK", 16)
    monkeypatch.setattr(index_select, "_PROGRAMS_PER_SM", 400)
    check.index_topk(ops.index_topk.kernel, lengths, (3, 16, 12), fp8=False, ties=True)


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


def test_choice_does_not_depend_on_what_else_is_there() -> None:
    check.index_topk_is_invariant(ops.index_topk.kernel, (70, 9), (3, 16, 20), fp8=False)
