"""The Triton kernels of adapters on a CUDA device, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import lora_checks as check
import pytest
import torch

from tandem_kernels import ops

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poisoned_and_fresh() -> Iterator[None]:
    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)


def test_tokens_have_the_slots_of_their_rows() -> None:
    check.slots_of_tokens(ops.lora_slots_of_tokens, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [8, 16, 64, 256])
@pytest.mark.parametrize("num_tokens", [1, 16, 65, 700])
@pytest.mark.parametrize(
    ("inner", "counts"),
    [(4096, (4096, 1024, 1024)), (1024, (1024,)), (896, (4864, 4864)), (14336, (128,))],
)
def test_adapters_are_added_to_their_own_tokens(
    inner: int, counts: tuple[int, ...], num_tokens: int, rank: int, dtype: torch.dtype
) -> None:
    columns = ops.lora_shrink, ops.lora_expand
    check.shrink_and_expand(*columns, num_tokens, inner, counts, rank, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rank", "num_slots"), [(8, 3), (16, 8), (64, 5), (256, 2)])
@pytest.mark.parametrize("num_tokens", [1, 16, 64])
@pytest.mark.parametrize(
    ("inner", "counts"),
    [(4096, (4096, 1024, 1024)), (1024, (1024,)), (896, (4864, 4864)), (14336, (128,))],
)
def test_few_tokens_take_fewer_programs(
    inner: int,
    counts: tuple[int, ...],
    num_tokens: int,
    rank: int,
    num_slots: int,
    dtype: torch.dtype,
) -> None:
    few = ops.lora_shrink, ops.lora_expand_few, ops.lora_expand_gated
    for pieces in (4, 16):
        check.few_tokens(
            *few, num_tokens, inner, counts, rank, dtype, "cuda", num_slots, most_pieces=pieces
        )
