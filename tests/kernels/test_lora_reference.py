"""The operations of adapters in plain torch, against float64."""

from __future__ import annotations

import lora_checks as check
import pytest
import torch

from tandem_kernels import ops


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def test_tokens_have_the_slots_of_their_rows() -> None:
    check.slots_of_tokens(ops.lora_slots_of_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [(40,), (24, 24), (48, 16, 16)])
def test_adapters_are_added_to_their_own_tokens(
    counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    columns = ops.lora_shrink, ops.lora_expand
    check.shrink_and_expand(*columns, 37, 96, counts, 8, dtype)
    few = ops.lora_shrink, ops.lora_expand_few, ops.lora_expand_gated
    check.few_tokens(*few, 37, 96, counts, 8, dtype)
    check.one_launch(ops.lora_gemm, ops.lora_gate_up, 9, 96, counts, 8, 3, dtype)
