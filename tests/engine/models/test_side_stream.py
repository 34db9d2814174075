"""Tests what runs beside experts: on a stream of its own in recorded steps of few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers import side_stream as side_stream_module
from engine.layers.feed_forward import sparse_mlp as sparse_mlp_module
from engine.layers.feed_forward.mlp import GatedMLP
from engine.layers.feed_forward.paired_mlp import PairedMLP
from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.layers.streams.hyper_connection import HyperConnection, HyperStream
from engine.models.decoder.expert_block import sparse_mlp
from engine.models.specs.experts import SHARED_EXPERTS, ExpertSpec
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops
from tandem_kernels.stream_forms import StreamForm

Block = SparseMLP | PairedMLP


def block(
    policy: GemmPolicy, hidden: int, dtype: torch.dtype, device: str, shared_size: int | None = None
) -> SparseMLP:
    """Returns experts beside a shared one."""
    spec = ExpertSpec(
        count=8,
        top_k=3,
        intermediate_size=hidden // 2,
        renormalise=False,
        dense_layers=(),
        shared_size=hidden if shared_size is None else shared_size,
        shared_gate=True,
        names=SHARED_EXPERTS,
    )
    shard = Shard(ParallelPlace(range(1)), dtype, torch.device(device), policy)
    made = sparse_mlp(hidden, spec, shard)
    generator = torch.Generator(device).manual_seed(3)
    for parameter in made.parameters():
        parameter.normal_(std=hidden**-0.5, generator=generator)
    return made


def computed(mlp: Block, x: Tensor) -> Tensor:
    """Returns the norm of the stream behind the block, and the stream."""
    stream = ResidualStream(x.clone())
    first, last = (
        RMSNorm(x.shape[1], 1e-5, Shard(ParallelPlace(range(1)), x.dtype, x.device))
        for _ in range(2)
    )
    for norm in (first, last):
        norm.weight.data = torch.linspace(0.5, 2.0, x.shape[1], dtype=x.dtype, device=x.device)
    mlp(stream, first, torch.arange(len(x), device=x.device))
    return torch.cat((stream.normed(last), stream.read(None)))


def launched(mlp: Block) -> list[str]:
    """Returns what a block of few rows asks for."""
    asked: list[str] = []

    def noting(op: ops.Op[..., Any]) -> Callable[..., Any]:
        meaning = op.reference

        def run(*args: Any, **options: Any) -> Any:
            kinds = [type(one).__name__ for one in (*args, *options.values())]
            asked.append(f"{meaning.__name__} {kinds}")
            return meaning(*args, **options)

        return run

    with ops.standing_in(noting):
        computed(mlp, torch.randn(3, 32))
    return asked


def paired(policy: GemmPolicy, hidden: int, dtype: torch.dtype, device: str) -> PairedMLP:
    """Returns a dense block beside experts that read other norms."""
    shard = Shard(ParallelPlace(range(1)), dtype, torch.device(device), policy)
    sparse = block(policy, hidden, dtype, device, shared_size=0)
    sparse.router.norm, sparse.input_norm, *norms = (
        RMSNorm(hidden, 1e-5, shard, factor=factor) for factor in (0.5, 1.0, 2.0, 1.0, 1.0)
    )
    made = PairedMLP(GatedMLP(hidden, hidden, shard), sparse, (norms[0], norms[1]), norms[2])
    generator = torch.Generator(device).manual_seed(4)
    for parameter in made.parameters():
        parameter.normal_(std=hidden**-0.5, generator=generator)
    return made


BLOCKS: dict[str, Callable[[GemmPolicy, int, torch.dtype, str], Block]] = {
    "shared expert": block,
    "dense block": paired,
}


def noting_side(done: list[str]) -> type:
    """Returns what stands in for a side, and writes down what it is asked for."""

    class Side:
        def __init__(self, device: torch.device, lane: int = 0) -> None:
            done.append("fork")

        @contextmanager
        def beside(self) -> Iterator[None]:
            yield
            done.append("beside")

        def join(self) -> None:
            done.append("join")

    return Side


@torch.inference_mode()
def test_shares_of_streams_are_joined_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(side_stream_module, "SideStream", noting_side(done))
    policy = GemmPolicy(beside_rows=4)
    shard = Shard(ParallelPlace(range(1)), torch.float32, torch.device("cpu"), policy)
    block = HyperConnection(16, 4, StreamForm(3, 1e-6, 1e-6), shard)
    norm = RMSNorm(16, 1e-6, shard)
    torch.manual_seed(5)
    for parameter in (*block.parameters(), *norm.parameters()):
        parameter.normal_()
    rows, values = torch.randn(3, 16), []
    for recording in (True, False):
        monkeypatch.setattr(side_stream_module, "is_recording", lambda x, now=recording: now)
        stream = HyperStream.begun(rows, 4)
        for _ in range(2):
            stream.enter(block)
            stream.add(stream.read(norm))
        values.append(stream.value())
        assert done == (["fork", "beside", "join"] * 2 if recording else [])
        done.clear()
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_forks_and_joins_where_it_may(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    side, recording = noting_side(done), True
    for module in (sparse_mlp_module, side_stream_module):
        monkeypatch.setattr(module, "SideStream", side)
        monkeypatch.setattr(module, "is_recording", lambda x: recording)
    mlp = BLOCKS[name](GemmPolicy(beside_rows=4), 32, torch.float32, "cpu")
    alone = BLOCKS[name](GemmPolicy(), 32, torch.float32, "cpu")
    for rows, forks in ((4, True), (5, False)):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(computed(mlp, x), computed(alone, x), rtol=1e-5, atol=1e-5)
        assert done == (["fork", "beside", "join"] if forks else [])
        done.clear()
    recorded = launched(mlp)
    done.clear()
    recording = False
    assert launched(mlp) == recorded, "a graph cannot record what is not loaded yet"
    assert done == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("rows", [1, 16, 100])
@torch.inference_mode()
def test_a_recorded_block_computes_what_a_launched_one_does(name: str, rows: int) -> None:
    """Several blocks behind each other, as in a model: memory of the side is used again."""
    policy = GemmPolicy(small_m_rows=16, beside_rows=512)
    mlp = BLOCKS[name](policy, 1024, torch.bfloat16, "cuda")
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
