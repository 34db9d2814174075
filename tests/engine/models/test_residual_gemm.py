"""Row layers that add to the residual stream themselves give what the norm would have added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.distributed import ParallelGroup
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import RowParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.parallel import ParallelPlace
from tests.engine.models.parity_cases import prompts
from tests.engine.models.rank_process import CHUNK, make_paged_model
from tests.engine.models.reference_models import (
    FAMILIES,
    reference,
    reference_logits,
    save_checkpoint,
)

MANY = 20
"""A number between the lengths of the prompts' chunks: some steps add, some do not."""


def test_logits_equal_transformers(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["llama"], tmp_path)
    paged = make_paged_model(tmp_path, ParallelGroup(0, 1))
    paged.use_gemms(GemmPolicy(residual_rows=MANY))
    expected = reference(tmp_path)
    for logits, prompt in zip(paged.prefill(prompts(), CHUNK), prompts(), strict=True):
        torch.testing.assert_close(logits, reference_logits(expected, prompt), rtol=1e-4, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_as_exact_on_a_gpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    shard = Shard(ParallelPlace(range(1)), dtype, device, GemmPolicy(residual_rows=1))
    layer = RowParallelLinear(4096, 1024, shard)
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    layer.weight.copy_(normal(1024, 4096))
    x, residual = normal(2048, 4096), 64 * normal(2048, 1024)
    exact = residual.double() + x.double() @ layer.weight.double().t()
    twice = (residual + layer(x)).double()
    assert layer.method.add_to(layer, x, residual)
    error = (residual.double() - exact).norm() / exact.norm()
    assert error <= (twice - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(
    ("rows", "residual_rows", "in_gemm"),
    [(MANY, MANY, True), (MANY - 1, MANY, False), (MANY, 0, False)],
)
def test_the_stream_hides_who_adds(rows: int, residual_rows: int, in_gemm: bool) -> None:
    policy = GemmPolicy(residual_rows=residual_rows)
    shard = Shard(ParallelPlace(range(1)), torch.float32, torch.device("cpu"), policy)
    layer, norm = RowParallelLinear(4, 8, shard), RMSNorm(8, 1e-5, shard)
    torch.manual_seed(3)
    layer.weight.normal_()
    norm.weight.normal_()
    x, residual = torch.randn(rows, 4), torch.randn(rows, 8)
    expected = residual + x @ layer.weight.t()
    stream = ResidualStream(residual.clone())
    layer.add_to(stream, x)
    assert torch.equal(stream.sum, residual) != in_gemm
    torch.testing.assert_close(stream.normed(norm), norm(expected))
    torch.testing.assert_close(stream.sum, expected)
    assert torch.equal(stream.normed(norm), norm(stream.sum)), "nothing is added twice"
