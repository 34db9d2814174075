"""The plain-torch column of linear attention, against float64."""

from __future__ import annotations

import delta_checks as check
import pending_checks
import pytest
import torch

from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import StateMetadata

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
batches = pytest.mark.parametrize("batch", [check.DECODES, check.MIXED, check.BORDERS])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@dtypes
@batches
@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_causal_conv(dtype: torch.dtype, batch: check.Batch, kernel: int) -> None:
    sizes, is_plain = check.Sizes(kernel=kernel), kernel == 2
    check.causal_conv(ops.causal_conv, batch, sizes, dtype)
    check.causal_conv(
        ops.causal_conv, batch, sizes, dtype, has_bias=not is_plain, activates=not is_plain
    )


def test_a_step_may_overwrite_the_metadata_of_the_one_before() -> None:
    """An engine writes the numbers of each step into the same tensors."""

    def numbers(*given: int) -> torch.Tensor:
        return torch.tensor(given, dtype=torch.int32)

    blocks, lengths = numbers(1, 2), numbers(1, 4)
    overwritten = StateMetadata(blocks, numbers(0, 1, 3), lengths, 0)
    x, weight = torch.randn(3, 8), torch.randn(8, 4)

    def convolved(metadata: StateMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.arange(3 * 8 * 3.0).view(3, 8, 3)
        return ops.causal_conv(x, weight, states, metadata), states

    before = convolved(overwritten)
    blocks.copy_(torch.tensor([2, 0]))
    lengths.copy_(torch.tensor([3, 2]))
    metadata = StateMetadata(numbers(2, 0), numbers(0, 1, 3), numbers(3, 2), 0)
    for found, expected, old in zip(
        convolved(overwritten), convolved(metadata), before, strict=True
    ):
        assert torch.equal(found, expected)
        assert not torch.equal(found, old)


@dtypes
@batches
def test_gated_delta_rule(dtype: torch.dtype, batch: check.Batch) -> None:
    for sizes in (
        check.Sizes(),
        check.Sizes(key_heads=4, by_channel=True),
        check.Sizes(key_heads=4, by_channel=True, decay_floor=-5.0),
        check.Sizes(rate_scale=2.0),
    ):
        check.gated_delta_rule(ops.gated_delta_rule, batch, sizes, dtype)


@dtypes
def test_gates(dtype: torch.dtype) -> None:
    for is_sigmoid in (False, True):
        check.gated_rms_norm(ops.gated_rms_norm, 5, 3, 24, dtype, "cpu", is_sigmoid=is_sigmoid)
    check.gate_and_mul(ops.sigmoid_and_mul, ops.softplus_and_mul, 5, 72, dtype, "cpu")
    check.row_gate(ops.row_gate, 5, 72, dtype, "cpu")


@dtypes
@pytest.mark.parametrize("most", [2, 4, 5])
def test_drafts_change_no_bit_of_a_state(dtype: torch.dtype, most: int) -> None:
    for kernel in (2, 4, 8):
        sizes = check.Sizes(kernel=kernel)
        pending_checks.drafts(ops.causal_conv, ops.gated_delta_rule, sizes, dtype, most=most)
    pending_checks.kda_drafts(ops.causal_conv, ops.gated_delta_rule, dtype, most=most)


@pytest.mark.parametrize(("rows", "kernel"), [(1, 4), (4, 2)])
def test_projections_with_their_convolution(rows: int, kernel: int) -> None:
    check.few_row_conv(ops.few_row_conv, rows, kernel, torch.bfloat16, has_bias=rows > 1)
