"""Windows beside rows of several tokens, and residual streams, on a CUDA device."""

from __future__ import annotations

import pytest
import sparse_checks
import token_row_checks as check
import torch
from gpu_fixtures import halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.attention import index_rows
from tandem_kernels.attention.token_rows import TokenRowForm

pytestmark = pytest.mark.gpu
LENGTHS = (
    ([1, 127, 0, 129, 1000], [1] * 5),
    ([5000], [1]),
    ([300, 700, 1500], [1, 129, 1400]),
    ([300, 0, 700, 0], [100, 0, 400, 0]),
)


@halves
@pytest.mark.parametrize("num_heads", [8, 64, 128])
def test_shared_vectors(dtype: torch.dtype, num_heads: int) -> None:
    sizes = num_heads, 512, 64
    check.shared_rope_and_cache(ops.shared_rope_and_cache, sizes, dtype, device="cuda")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "form", [TokenRowForm(4, True, 512), TokenRowForm(4, True, 128), TokenRowForm(128, False, 512)]
)
def test_rows_that_are_closed(lengths: sparse_checks.Lengths, form: TokenRowForm) -> None:
    """A decode that closes no row is among them."""
    check.close_rows(
        ops.close_rows, ([*lengths[0], 256], [*lengths[1], 1]), form, 64, device="cuda"
    )


@halves
def test_rows_that_are_written(dtype: torch.dtype) -> None:
    check.cache_rows(ops.cache_rows, dtype, device="cuda")
    check.narrow_rows(ops.cache_rows, 64, 512, dtype, device="cuda")
    check.keep_open_tokens(ops.keep_open_tokens, device="cuda")
    check.closed_slots(ops.closed_slots, device="cuda")
    check.placed_ids(ops.placed_ids, device="cuda")


@halves
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("many", [1, 256])
def test_queries_and_keys_of_rows(
    dtype: torch.dtype, fp8: bool, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_rows, "_MANY", many)
    check.index_rows(ops.index_rows, (64, 128, 64), dtype, fp8=fp8, device="cuda")


@halves
@pytest.mark.parametrize("num_heads", [8, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 0), (4, 64), (4, 0), (128, 0)])
@pytest.mark.parametrize("narrow_rope", [0, 64])
def test_attention_to_window_and_rows(
    lengths: sparse_checks.Lengths,
    num_heads: int,
    dtype: torch.dtype,
    tokens: int,
    top_k: int,
    narrow_rope: int,
) -> None:
    decodes = len(lengths[0]) if max(lengths[1]) == 1 else 0
    check.window_rows_attention(
        ops.window_rows_attention, ops.window_rows_fp8, lengths, (num_heads, 512), dtype,
        window=128, tokens=tokens, top_k=top_k, num_decodes=decodes, narrow_rope=narrow_rope,
        device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS)
def test_choice_of_rows(lengths: sparse_checks.Lengths) -> None:
    sparse_checks.index_topk(
        ops.index_topk, lengths, (64, 128, 64), fp8=True, ties=True, tokens=4, device="cuda"
    )


@pytest.mark.parametrize("listed", [False, True])
def test_experts_by_roots_and_by_ids(listed: bool) -> None:
    check.route_tokens(ops.route_tokens, listed=listed, device="cuda")


@halves
def test_capped_gates(dtype: torch.dtype) -> None:
    check.capped_gates(ops.bounded_gate_and_mul, dtype, "cuda")


@halves
@pytest.mark.parametrize("shape", [(1, 4, 4096), (70, 4, 7168), (4500, 4, 512)])
def test_residual_streams(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    kernels = ops.read_streams, ops.write_streams, ops.join_streams
    check.residual_streams(*kernels, shape, dtype, device="cuda")


@halves
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 4, 4096), (16, 4, 4096), (64, 4, 7168), (70, 4, 7168), (4500, 4, 544)]
)
def test_streams_between_blocks(
    dtype: torch.dtype, shape: tuple[int, int, int], beside: bool
) -> None:
    of_streams = ops.mix_streams, ops.norm_streams, ops.share_streams
    check.entered_streams(of_streams, shape, dtype, beside=beside, device="cuda")


@halves
@pytest.mark.parametrize("shape", [(1, 1, 4096), (8, 70, 7168)])
def test_mixed_blocks(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    check.mixed_blocks(ops.mix_blocks, shape, dtype, device="cuda")
