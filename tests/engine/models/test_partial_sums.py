"""A rank's part of a sum may wait in the residual stream for the norm that sums it up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.layers.linear import RowParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import PartialSum
from engine.layers.shard import Shard
from engine.models.decoder.expert_block import sparse_mlp
from engine.models.specs.experts import ExpertSpec
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops

ROWS, HIDDEN, CPU = 3, 32, torch.device("cpu")


class Twins(ParallelGroup):
    """Rank 0 of two, of which the other always has the same numbers. `done` lists what was asked
    of it. `takes`: norms are fused."""

    def __init__(self, *, fuses: bool = True, takes: bool = True) -> None:
        super().__init__(0, 1)
        self.size = 2
        self.fuses, self.takes = fuses, takes
        self.done: list[str] = []

    @property
    def fuses_norm(self) -> bool:
        return self.fuses

    def all_reduce(self, x: Tensor) -> Tensor:
        self.done.append("sum")
        return x + x

    def reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        self.done.append("sum and norm" if self.takes else "refused")
        if not self.takes:
            return None
        residual += x + x
        return ops.rms_norm(residual, weight, eps)


def shard_of(group: ParallelGroup) -> Shard:
    return Shard(ParallelPlace(range(1), group), torch.float32, CPU)


def norm_of(group: ParallelGroup) -> RMSNorm:
    norm = RMSNorm(HIDDEN, 1e-5, shard_of(group))
    norm.weight.data = torch.linspace(0.5, 2.0, HIDDEN)
    return norm


def waiting(group: ParallelGroup) -> tuple[ResidualStream, Tensor]:
    """Returns a stream in which a part waits, and what the stream is with it."""
    before, part = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    stream = ResidualStream(before.clone())
    stream.add(PartialSum(part, group))
    return stream, before + (part + part)


@pytest.mark.parametrize(("takes", "done"), [(True, ["sum and norm"]), (False, ["refused", "sum"])])
def test_a_norm_sums_what_waits(takes: bool, done: list[str]) -> None:
    group = Twins(takes=takes)
    norm = norm_of(group)
    stream, total = waiting(group)
    torch.testing.assert_close(stream.normed(norm), ops.rms_norm(total, norm.weight, norm.eps))
    assert group.done == done
    torch.testing.assert_close(stream.read(None), total)
    assert group.done == done, "nothing waits any more"


@pytest.mark.parametrize(
    "read", [lambda stream: stream.read(None), ResidualStream.value], ids=["read", "value"]
)
def test_whoever_reads_the_stream_itself_sums_once(
    read: Callable[[ResidualStream], Tensor],
) -> None:
    group = Twins()
    norm = norm_of(group)
    stream, total = waiting(group)
    torch.testing.assert_close(read(stream), total)
    torch.testing.assert_close(stream.normed(norm), ops.rms_norm(total, norm.weight, norm.eps))
    assert group.done == ["sum"]


def test_rows_are_added_to_the_sum() -> None:
    group = Twins()
    stream, total = waiting(group)
    stream.add_to_rows(torch.tensor([1]), torch.ones(1, HIDDEN))
    total[1] += 1
    torch.testing.assert_close(stream.read(None), total)
    assert group.done == ["sum"]


@torch.inference_mode()
def test_layers_leave_their_sum_to_the_norm_where_ranks_fuse_both() -> None:
    """Row layers and mixtures of experts do; either way the stream is the same."""
    for make in (row_layer, experts):
        normed = {}
        for fuses, done in ((True, ["sum and norm"]), (False, ["sum"])):
            torch.manual_seed(1)
            group = Twins(fuses=fuses)
            add_to = make(group)
            stream = ResidualStream(torch.randn(ROWS, HIDDEN))
            add_to(stream)
            normed[fuses] = stream.normed(norm_of(group))
            assert group.done == done
        torch.testing.assert_close(normed[True], normed[False])


def row_layer(group: ParallelGroup) -> Callable[[ResidualStream], None]:
    layer = RowParallelLinear(2 * HIDDEN, HIDDEN, shard_of(group))
    layer.weight.normal_()
    x = torch.randn(ROWS, HIDDEN)
    return lambda stream: layer.add_to(stream, x)


def experts(group: ParallelGroup) -> Callable[[ResidualStream], None]:
    spec = ExpertSpec(count=4, top_k=2, intermediate_size=16, renormalise=True)
    block: SparseMLP = sparse_mlp(HIDDEN, spec, shard_of(group))
    for parameter in block.parameters():
        parameter.normal_()
    return lambda stream: block(stream, None, torch.arange(ROWS))
