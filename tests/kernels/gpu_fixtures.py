"""Tests of kernels on a CUDA device share this; fresh outputs start as NaN, and kernels are held to
what is stated of their tensors."""

from __future__ import annotations

from collections.abc import Iterator

import kernel_checks as check
import kernel_oracle as oracle
import pytest
import torch

from tandem_kernels import ops

HALVES = [torch.float16, torch.bfloat16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
head_dims = pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])


@pytest.fixture(autouse=True)
def poisoned_and_fresh() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with ops.checked_kernels():
        yield
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)


def check_attention(seq_lens: list[int], query_lens: list[int], **shape: object) -> None:
    batch = oracle.paged_batch(seq_lens, query_lens, device="cuda", **shape)  # type: ignore[arg-type]
    check.paged_attention(ops.paged_attention, batch)
