"""Plain-torch paged attention against a float64 softmax, with NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import replace

import fp8_checks
import kernel_checks as check
import kernel_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_kernels import ops


@pytest.mark.parametrize("dtype", list(check.ATTENTION), ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_mixed_batch(dtype: torch.dtype, group: int, head_dim: int) -> None:
    torch.manual_seed(group)
    check.paged_attention(
        ops.paged_attention,
        oracle.paged_batch(
            [5, 70, 33, 1, 64, 20, 41],
            [1, 1, 1, 1, 7, 20, 40],
            num_kv_heads=2,
            group=group,
            head_dim=head_dim,
            block_size=16,
            dtype=dtype,
        ),
    )


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_bounded_scores(window: int | None, fixed_order: bool) -> None:
    torch.manual_seed(2)
    batch = oracle.paged_batch(
        [5, 70, 33, 64, 20],
        [1, 1, 1, 7, 20],
        num_kv_heads=2,
        group=3,
        head_dim=24,
        block_size=16,
        window=window,
    )
    batch.softcap = 0.7
    batch.metadata = replace(batch.metadata, fixed_order=fixed_order)
    check.paged_attention(ops.paged_attention, batch)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("window", [None, 16, 40])
def test_sinks(window: int | None, fixed_order: bool) -> None:
    torch.manual_seed(4)
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 24, "block_size": 16, "window": window}
    lengths = [5, 0, 70, 16, 17, 64, 20], [1, 1, 1, 1, 1, 7, 20]
    check.attention_with_sinks(ops.paged_attention, *lengths, fixed_order=fixed_order, **shape)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("window", [None, 16, 40])
@pytest.mark.parametrize("page_padding", [0, 640, 7])
def test_values_narrower_than_keys(
    window: int | None, page_padding: int, fixed_order: bool
) -> None:
    torch.manual_seed(6)
    shape = {
        "num_kv_heads": 2, "group": 3, "head_dim": 24, "value_dim": 16, "block_size": 16,
        "window": window, "page_padding": page_padding, "fixed_order": fixed_order,
    }  # fmt: skip
    lengths = [5, 0, 70, 16, 17, 64, 20], [1, 1, 1, 1, 1, 7, 20]
    check.attention_with_sinks(ops.paged_attention, *lengths, **shape)
    fp8_checks.paged_attention(ops.paged_attention, *lengths, **shape)
    del shape["fixed_order"]
    check.paged_attention(ops.paged_attention, oracle.paged_batch(*lengths, **shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fixed_order(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check.attention_in_fixed_order(ops.paged_attention, dtype, 16)


@settings(max_examples=30, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 90), max_size=5),
    prefills=st.lists(st.tuples(st.integers(0, 50), st.integers(2, 40)), max_size=3),
    block_size=st.sampled_from([1, 16, 64]),
    seed=st.integers(0, 1000),
)
def test_any_mixture(
    decodes: list[int], prefills: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    if not decodes and not prefills:
        return
    torch.manual_seed(seed)
    check.paged_attention(
        ops.paged_attention,
        oracle.paged_batch(
            [*decodes, *(cached + new for cached, new in prefills)],
            [*(1 for _ in decodes), *(new for _, new in prefills)],
            num_kv_heads=1,
            group=2,
            head_dim=8,
            block_size=block_size,
        ),
    )


@settings(max_examples=40, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 90), max_size=4),
    prefills=st.lists(st.tuples(st.integers(0, 50), st.integers(2, 40)), max_size=3),
    block_size=st.sampled_from([1, 16, 64]),
    window=st.integers(1, 60),
    fixed_order=st.booleans(),
)
def test_through_a_window(
    decodes: list[int],
    prefills: list[tuple[int, int]],
    block_size: int,
    window: int,
    fixed_order: bool,
) -> None:
    """No number of what lies before it is used."""
    if not decodes and not prefills:
        return
    torch.manual_seed(window)
    batch = oracle.paged_batch(
        [*decodes, *(cached + new for cached, new in prefills)],
        [*(1 for _ in decodes), *(new for _, new in prefills)],
        num_kv_heads=1,
        group=2,
        head_dim=8,
        block_size=block_size,
        window=window,
        page_padding=8,
    )
    batch.metadata = replace(batch.metadata, fixed_order=fixed_order)
    check.paged_attention(ops.paged_attention, batch)


def test_pages_with_room_behind_the_block() -> None:
    torch.manual_seed(3)
    batch = oracle.paged_batch(
        [37, 20, 40], [1, 1, 9], num_kv_heads=2, group=2, head_dim=16, block_size=16,
        page_padding=24,
    )  # fmt: skip
    check.paged_attention(ops.paged_attention, batch)


def test_padding_requests_and_their_rows_give_zero() -> None:
    torch.manual_seed(1)
    batch = oracle.paged_batch(
        [9, 0, 12, 0],
        [1, 1, 1, 1],
        num_kv_heads=2,
        group=2,
        head_dim=8,
        block_size=4,
    )
    out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, batch.scale)
    assert torch.equal(out[[1, 3]], torch.zeros_like(out[[1, 3]]))
    assert oracle.relative_error(out, batch.expected()) < 2e-6


def test_one_token_of_a_prompt_equals_a_decode() -> None:
    """A request is the same whether it counts as a decode or as a chunk of one token."""
    torch.manual_seed(2)
    batch = oracle.paged_batch(
        [37, 20], [1, 1], num_kv_heads=2, group=2, head_dim=16, block_size=16
    )
    as_decode = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, batch.scale)
    other = type(batch.metadata)(
        batch.metadata.block_tables,
        batch.metadata.query_start_loc,
        batch.metadata.seq_lens,
        num_decodes=0,
        max_query_len=1,
        max_seq_len=37,
    )
    as_chunk = ops.paged_attention(batch.q, batch.kv_cache, other, batch.scale)
    assert oracle.relative_error(as_chunk, as_decode) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_of_contexts(dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    check.gather_context(ops.gather_context, 24, dtype)
    check.gather_context(ops.gather_context, 24, dtype, value_dim=16)


@pytest.mark.parametrize("dtype", list(check.ATTENTION), ids=str)
def test_sinks_behind_a_complete_softmax(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    check.add_sinks(ops.add_sinks, (37, 3, 24), dtype)
