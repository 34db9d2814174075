"""Row layers that add to the residual stream themselves give what the norm would have added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import RowParallelLinear
from engine.layers.methods.lora import AdapterTokens, WithAdapters
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from tandem_kernels.lora.lora_gemm_shapes import num_counters
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


class RankOfTwo(ParallelGroup):
    """One of two ranks; `parts` lists what it gave to sums, which are what it gave."""

    def __init__(self, rank: int) -> None:
        super().__init__(0, 1)
        self.rank, self.size = rank, 2
        self.parts: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.parts.append(x.clone())
        return x


@pytest.mark.parametrize(
    ("rows", "bias", "in_gemm"),
    [(MANY, False, True), (MANY - 1, False, False), (MANY, True, False)],
)
def test_the_first_of_two_ranks_adds_to_the_stream(rows: int, bias: bool, in_gemm: bool) -> None:
    """Then the stream is the sum of what both give, and waits for nothing; a layer with a bias,
    which one of the ranks has, adds as ever."""
    torch.manual_seed(3)
    residual, given = torch.randn(rows, 8), torch.zeros(rows, 8)
    expected = residual.clone() if in_gemm else torch.zeros(rows, 8)
    for rank in (0, 1):
        group = RankOfTwo(rank)
        place = ParallelPlace(range(1), group)
        policy = GemmPolicy(shared_residual_rows=MANY)
        shard = Shard(place, torch.float32, torch.device("cpu"), policy)
        layer = RowParallelLinear(8, 8, shard, bias=bias)
        layer.weight.normal_()
        x, stream = torch.randn(rows, 4), ResidualStream(residual.clone())
        if layer.bias is not None:
            layer.bias.normal_()
            expected += layer.bias
        expected += x @ layer.weight.t()
        layer.add_to(stream, x)
        (part,) = group.parts
        given += part
        if in_gemm:
            assert torch.equal(stream.value(), part), "nothing waits"
        else:
            torch.testing.assert_close(stream.value(), residual + part)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_share_the_stream_have_adapters(rank: int) -> None:
    """Adapters add to what is summed, as the first rank does with the residual stream."""
    torch.manual_seed(5)
    rows, group = MANY, RankOfTwo(rank)
    policy = GemmPolicy(shared_residual_rows=MANY)
    shard = Shard(ParallelPlace(range(1), group), torch.float32, torch.device("cpu"), policy)
    layer = RowParallelLinear(8, 8, shard)
    layer.weight.normal_()
    a, b, tokens = torch.randn(3, 2, 4), torch.randn(3, 8, 2), AdapterTokens()
    counters = torch.zeros(num_counters(8), dtype=torch.int32)
    layer.method = WithAdapters(layer.method, tokens, a, b, (8,), counters, fixed_order=False)
    x, residual = torch.randn(rows, 4), torch.randn(rows, 8)
    expected = x @ layer.weight.t() + (residual if rank == 0 else 0)
    layer.add_to(ResidualStream(residual.clone()), x)
    torch.testing.assert_close(group.parts.pop(), expected)
    tokens.slots = torch.randint(-1, 3, (rows,), dtype=torch.int32)
    for row, slot in enumerate(tokens.slots.tolist()):
        if slot >= 0:
            expected[row] += b[slot] @ (a[slot] @ x[row])
    layer.add_to(ResidualStream(residual.clone()), x)
    (part,) = group.parts
    torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)
