"""Attention on a CUDA device, against float64: windows, sinks, bounded scores, fixed order."""

from __future__ import annotations

import fp8_checks
import kernel_checks as check
import kernel_oracle as oracle
import pytest
import torch
from gpu_fixtures import check_attention, halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.attention.value_form import ValueForm

pytestmark = pytest.mark.gpu


@halves
@pytest.mark.parametrize("block_size", [16, 128])
def test_attention_in_fixed_order(dtype: torch.dtype, block_size: int) -> None:
    check.attention_in_fixed_order(ops.paged_attention, dtype, block_size, "cuda")


@halves
@pytest.mark.parametrize("window", [1, 128, 200, 5000])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_attention_through_a_window(dtype: torch.dtype, window: int, block_size: int) -> None:
    shape = {"num_kv_heads": 2, "group": 4, "head_dim": 128, "dtype": dtype, "window": window}
    padded = {**shape, "block_size": block_size, "page_padding": 1024}
    check_attention([1, 127, 128, 129, 1000, 0], [1] * 6, **padded)
    check_attention([6000], [1], **padded)
    check_attention([300, 700, 2500], [1, 129, 2400], **padded)


@halves
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_attention_with_bounded_scores(
    dtype: torch.dtype, window: int | None, head_dim: int
) -> None:
    shape = {"num_kv_heads": 2, "group": 2, "head_dim": head_dim, "dtype": dtype, "block_size": 64}
    lengths = [1, 127, 128, 1000, 2500], [1, 1, 1, 129, 2400]
    batch = oracle.paged_batch(*lengths, **shape, window=window, device="cuda")  # type: ignore[arg-type]
    batch.softcap = 0.7
    check.paged_attention(ops.paged_attention, batch)


@halves
@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("window", [None, 128, 1024])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(8, 8), (4, 8), (2, 3)])
def test_attention_with_sinks(
    dtype: torch.dtype, num_kv_heads: int, group: int, window: int | None, fixed_order: bool
) -> None:
    shape = {
        "num_kv_heads": num_kv_heads, "group": group, "head_dim": 64, "dtype": dtype,
        "window": window, "block_size": 64, "fixed_order": fixed_order, "device": "cuda",
    }  # fmt: skip
    op = ops.paged_attention
    for lengths in (
        ([1, 127, 128, 129, 1000, 0, 9000], [1] * 7),
        ([5000], [1]),
        ([300, 0, 700, 2500], [1, 1, 129, 2400]),
    ):
        check.attention_with_sinks(op, *lengths, **shape)  # type: ignore[arg-type]


@halves
@pytest.mark.parametrize("sizes", [(1, 64, 64), (1000, 64, 64), (333, 6, 80)], ids=str)
def test_sinks_behind_a_complete_softmax(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    check.add_sinks(ops.add_sinks, sizes, dtype, "cuda")


@pytest.mark.parametrize("block_size", [64, 128])
def test_decodes_through_a_small_window(block_size: int) -> None:
    shape = {"num_kv_heads": 8, "group": 8, "head_dim": 64, "dtype": torch.bfloat16}
    lengths = [1, 127, 128, 129, 1000, 0, 9000], [1] * 7
    more = {"window": 128, "block_size": block_size, "device": "cuda"}
    check.attention_with_sinks(ops.paged_attention, *lengths, **shape, **more)  # type: ignore[arg-type]


@halves
@pytest.mark.parametrize("window", [None, 128, 1024])
@pytest.mark.parametrize("widths", [(192, 128), (24, 16)])
def test_values_narrower_than_keys(
    dtype: torch.dtype, widths: tuple[int, int], window: int | None
) -> None:
    """Decodes alone, few and many of them, behind prompts, and behind long contexts; with sinks,
    and over an FP8 cache."""
    shape = {
        "num_kv_heads": 4, "group": 16, "head_dim": widths[0], "value_dim": widths[1],
        "dtype": dtype, "window": window, "block_size": 64, "page_padding": 640, "device": "cuda",
    }  # fmt: skip
    for lengths in (
        ([1, 127, 128, 129, 1000, 0, 9000], [1] * 7),
        ([5000], [1]),
        ([700] * 70, [1] * 70),
        ([300, 700, 2500], [1, 129, 2400]),
        ([9000], [40]),
    ):
        check.attention_with_sinks(ops.paged_attention, *lengths, **shape)
        fp8_checks.paged_attention(ops.paged_attention, *lengths, **shape)


@halves
@pytest.mark.parametrize("window", [None, 1024])
def test_heads_of_512(dtype: torch.dtype, window: int | None) -> None:
    shape = {
        "num_kv_heads": 2, "group": 8, "head_dim": 512, "dtype": dtype, "window": window,
        "block_size": 64,
    }  # fmt: skip
    check_attention([1, 127, 128, 129, 1000, 0, 5000], [1] * 7, **shape)
    check_attention([300, 700, 2500], [1, 129, 2400], **shape)


@halves
def test_values_of_a_form(dtype: torch.dtype) -> None:
    for values in (ValueForm(normed=True), ValueForm(scale=0.7), ValueForm(normed=True, scale=2.0)):
        for sizes in ((192, 128), (512, 512), (256, 256)):
            check.written_values(ops.rope_and_cache, values, dtype, sizes, "cuda")
