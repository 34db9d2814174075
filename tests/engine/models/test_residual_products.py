"""Row layers that add to the residual stream themselves give what the norm would have added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.distributed import TensorParallelGroup
from engine.layers.linear import RowParallelLinear
from engine.layers.shard import Shard
from tests.engine.models.parity_cases import prompts
from tests.engine.models.rank_process import CHUNK, make_paged_model
from tests.engine.models.reference_models import (
    FAMILIES,
    reference,
    reference_logits,
    save_checkpoint,
)

MANY = 20
"""Between the lengths of the prompts' chunks: some steps add, some do not."""


def test_logits_equal_transformers(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["llama"], tmp_path)
    paged = make_paged_model(tmp_path, TensorParallelGroup(0, 1))
    for layer in paged.row_layers():
        layer.residual_rows = MANY
    expected = reference(tmp_path)
    for logits, prompt in zip(paged.prefill(prompts(), CHUNK), prompts(), strict=True):
        torch.testing.assert_close(logits, reference_logits(expected, prompt), rtol=1e-4, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_as_exact_on_a_gpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    layer = RowParallelLinear(4096, 1024, Shard(TensorParallelGroup(0, 1), dtype, device))
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    layer.weight.copy_(normal(1024, 4096))
    x, residual = normal(2048, 4096), 64 * normal(2048, 1024)
    exact = residual.double() + x.double() @ layer.weight.double().t()
    twice = (residual + layer(x)).double()
    layer.add(x, residual)
    error = (residual.double() - exact).norm() / exact.norm()
    assert error <= (twice - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps / 2


def test_few_rows_do_not_add() -> None:
    shard = Shard(TensorParallelGroup(0, 1), torch.float32, torch.device("cpu"), residual_rows=MANY)
    layer = RowParallelLinear(4, 8, shard)
    assert layer.adds_to(torch.empty(MANY, 8))
    assert not layer.adds_to(torch.empty(MANY - 1, 8))
    layer.residual_rows = 0
    assert not layer.adds_to(torch.empty(MANY, 8))
