"""The shared expert beside the others: on a stream of its own in recorded steps of few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from engine.layers import sparse_mlp as module
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.layers.sparse_mlp import SparseMLP
from engine.models.expert_block import sparse_mlp
from engine.models.specs.experts import SHARED_EXPERTS, ExpertSpec
from engine.parallel.place import ParallelPlace


def block(policy: GemmPolicy, hidden: int, dtype: torch.dtype, device: str) -> SparseMLP:
    spec = ExpertSpec(
        count=8,
        top_k=3,
        intermediate_size=hidden // 2,
        renormalise=False,
        dense_layers=(),
        shared_size=hidden,
        names=SHARED_EXPERTS,
    )
    shard = Shard(ParallelPlace(range(1)), dtype, torch.device(device), policy)
    made = sparse_mlp(hidden, spec, shard)
    generator = torch.Generator(device).manual_seed(3)
    for parameter in made.parameters():
        parameter.normal_(std=hidden**-0.5, generator=generator)
    return made


def computed(mlp: SparseMLP, x: Tensor) -> Tensor:
    stream = ResidualStream(x)
    mlp(stream, None, torch.arange(len(x), device=x.device))
    return stream.read(None)


def normed(mlp: SparseMLP, x: Tensor) -> Tensor:
    """Returns the norm of the stream behind the block, and the stream."""
    stream = ResidualStream(x.clone())
    mlp(stream, None, torch.arange(len(x), device=x.device))
    norm = RMSNorm(x.shape[1], 1e-5, Shard(ParallelPlace(range(1)), x.dtype, x.device))
    norm.weight.data = torch.linspace(0.5, 2.0, x.shape[1])
    return torch.cat((stream.normed(norm), stream.read(None)))


@torch.inference_mode()
def test_forks_and_joins_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Side:
        def __init__(self, device: torch.device) -> None:
            done.append("fork")

        @contextmanager
        def beside(self) -> Iterator[None]:
            yield
            done.append("beside")

        def join(self) -> None:
            done.append("join")

    monkeypatch.setattr(module, "SideStream", Side)
    recording = True
    monkeypatch.setattr(module, "is_recording", lambda x: recording)
    mlp = block(GemmPolicy(beside_rows=4), 32, torch.float32, "cpu")
    alone = block(GemmPolicy(), 32, torch.float32, "cpu")
    for rows, forks in ((4, True), (5, False)):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(computed(mlp, x), computed(alone, x), rtol=1e-5, atol=1e-5)
        assert done == (["fork", "beside", "join"] if forks else [])
        torch.testing.assert_close(normed(mlp, x), normed(alone, x), rtol=1e-5, atol=1e-5)
        done.clear()
    recording = False
    computed(mlp, torch.randn(1, 32))
    assert done == []


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 100])
@torch.inference_mode()
def test_a_recorded_block_computes_what_a_launched_one_does(rows: int) -> None:
    """Several blocks behind each other, as in a model: memory of the side is used again."""
    policy = GemmPolicy(small_m_rows=16, beside_rows=512)
    mlp = block(policy, 1024, torch.bfloat16, "cuda")
    given = torch.randn(6, rows, 1024, dtype=torch.bfloat16, device="cuda")

    def several() -> Tensor:
        return torch.stack([computed(mlp, x) for x in given])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        several()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = several()
    for seed in range(5):
        torch.manual_seed(seed)
        given.normal_()
        graph.replay()
        expected = several().double()
        assert float((found.double() - expected).norm() / expected.norm()) < 0.01
