"""Kernels of windows beside rows of several tokens, and of residual streams, in Triton's
interpreter, as `interpreted_layers`."""

from __future__ import annotations

import pytest
import sparse_checks
import token_row_checks as check
import torch
from interpreted_fixtures import dtypes, remembers, rounds_to_e4m3, seeded  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.attention import index_rows, index_topk
from tandem_kernels.attention.token_rows import TokenRowForm

RAGGED = [5, 70, 0, 33, 20], [1, 1, 1, 7, 20]
DECODES = [70, 9, 0, 33], [2, 2, 2, 2]
ATTENTION = ops.window_rows_attention.kernel, ops.window_rows_fp8.kernel


@dtypes
def test_shared_vectors(dtype: torch.dtype) -> None:
    check.shared_rope_and_cache(ops.shared_rope_and_cache.kernel, (18, 32, 8), dtype)


@pytest.mark.parametrize(("lengths", "num_decodes"), [(RAGGED, 0), (DECODES, 4)])
@pytest.mark.parametrize(
    "form", [TokenRowForm(4, True, 32, first=6), TokenRowForm(16, False, 16)], ids=str
)
def test_rows_that_are_closed(
    lengths: sparse_checks.Lengths, num_decodes: int, form: TokenRowForm
) -> None:
    check.close_rows(ops.close_rows.kernel, lengths, form, 8, num_decodes)


def test_rows_that_are_written() -> None:
    check.closed_slots(ops.closed_slots.kernel)
    check.placed_ids(ops.placed_ids.kernel)
    check.keep_open_tokens(ops.keep_open_tokens.kernel)
    check.cache_rows(ops.cache_rows.kernel, torch.float16)
    check.narrow_rows(ops.cache_rows.kernel, 8, 128, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "fp8", "many"),
    [(torch.float32, False, 256), (torch.float16, True, 256), (torch.float16, True, 1)],
)
def test_queries_and_keys_of_rows(
    dtype: torch.dtype, fp8: bool, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of more heads, for many tokens, make the same."""
    monkeypatch.setattr(index_rows, "_MANY", many)
    check.index_rows(ops.index_rows.kernel, (18, 32, 8), dtype, fp8=fp8)


@pytest.mark.parametrize(("lengths", "num_decodes"), [(RAGGED, 0), (DECODES, 4)])
@pytest.mark.parametrize(
    ("window", "tokens", "top_k"), [(17, 0, 0), (17, 4, 5), (17, 16, 0), (None, 4, 0)]
)
def test_attention_to_window_and_rows(
    lengths: sparse_checks.Lengths, num_decodes: int, window: int | None, tokens: int, top_k: int
) -> None:
    check.window_rows_attention(
        *ATTENTION, lengths, (5, 32), torch.float32,
        window=window, tokens=tokens, top_k=top_k, num_decodes=num_decodes,
    )  # fmt: skip


@pytest.mark.usefixtures("rounds_to_e4m3")
@pytest.mark.parametrize(("lengths", "num_decodes"), [(RAGGED, 0), (DECODES, 4)])
@pytest.mark.parametrize(("tokens", "top_k"), [(4, 5), (16, 0)])
def test_attention_to_narrow_rows(
    lengths: sparse_checks.Lengths, num_decodes: int, tokens: int, top_k: int
) -> None:
    check.window_rows_attention(
        *ATTENTION, lengths, (5, 128), torch.float32,
        window=17, tokens=tokens, top_k=top_k, num_decodes=num_decodes, narrow_rope=8,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [RAGGED, ([90, 3, 0, 45], [3] * 4)])
def test_choice_of_rows(lengths: sparse_checks.Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_topk, "_TILE", 16)
    sparse_checks.index_topk(
        ops.index_topk.kernel, lengths, (3, 16, 6), fp8=False, ties=True, tokens=4
    )


@pytest.mark.parametrize("listed", [False, True])
def test_experts_by_roots_and_by_ids(listed: bool) -> None:
    check.route_tokens(ops.route_tokens.kernel, listed=listed)


@dtypes
def test_capped_gates(dtype: torch.dtype) -> None:
    check.capped_gates(ops.bounded_gate_and_mul.kernel, dtype)


@dtypes
@pytest.mark.parametrize("num_tokens", [19, 130])
def test_residual_streams(dtype: torch.dtype, num_tokens: int) -> None:
    kernels = ops.read_streams.kernel, ops.write_streams.kernel, ops.join_streams.kernel
    check.residual_streams(*kernels, (num_tokens, 4, 40), dtype)


@dtypes
@pytest.mark.parametrize("shape", [(1, 4, 288), (19, 2, 40), (19, 4, 40), (130, 4, 40)])
def test_streams_between_blocks(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    of_streams = ops.mix_streams.kernel, ops.norm_streams.kernel, ops.share_streams.kernel
    check.entered_streams(of_streams, shape, dtype, beside=shape[0] != 19)


@dtypes
@pytest.mark.parametrize("count", [1, 3])
def test_mixed_blocks(count: int, dtype: torch.dtype) -> None:
    check.mixed_blocks(ops.mix_blocks.kernel, (count, 5, 40), dtype)
