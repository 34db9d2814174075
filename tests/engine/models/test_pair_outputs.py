"""The outputs of single experts wait in the residual stream for the norm that sums them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import PairOutputs
from engine.layers.shard import Shard
from engine.models.decoder.expert_block import sparse_mlp
from engine.models.specs.experts import ExpertSpec
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops

ROWS, HIDDEN, TOP_K, CPU = 5, 32, 3, torch.device("cpu")


def shard() -> Shard:
    return Shard(ParallelPlace(range(1)), torch.float32, CPU)


def norm() -> RMSNorm:
    made = RMSNorm(HIDDEN, 1e-5, shard())
    made.weight.data = torch.linspace(0.5, 2.0, HIDDEN)
    return made


def waiting() -> tuple[ResidualStream, Tensor]:
    """Returns a stream in which outputs wait, those of no expert among them, and what the stream is
    with them."""
    before, parts = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, TOP_K, HIDDEN)
    experts = torch.ones(ROWS, TOP_K, dtype=torch.int32)
    experts[1, 2] = experts[3, 0] = -1
    total = before + parts.masked_fill((experts < 0)[..., None], 0.0).sum(1)
    parts[experts < 0] = torch.nan
    stream = ResidualStream(before)
    stream.add(PairOutputs(parts.flatten(0, 1), experts))
    return stream, total


def read_and_normed(stream: ResidualStream, by: RMSNorm) -> Tensor:
    return by(stream.read(None))


@pytest.mark.parametrize(
    "look",
    [
        lambda stream, by: stream.normed(by),
        lambda stream, by: stream.read_unnormed(by, None),
        read_and_normed,
        lambda stream, by: by(stream.value()),
    ],
    ids=["norm", "rows to be normed", "stream", "value"],
)
def test_whoever_looks_sees_the_sum(look: Callable[[ResidualStream, RMSNorm], Tensor]) -> None:
    stream, total = waiting()
    assert stream.settled() is None
    by = norm()
    torch.testing.assert_close(look(stream, by), ops.rms_norm(total, by.weight, by.eps))
    torch.testing.assert_close(stream.read(None), total)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_beside_others_are_summed_by_themselves(shared: bool) -> None:
    shared_size = 16 if shared else 0
    spec = ExpertSpec(
        count=6, top_k=TOP_K, intermediate_size=16, renormalise=True, shared_size=shared_size
    )
    block = sparse_mlp(HIDDEN, spec, shard())
    for parameter in block.parameters():
        parameter.data.normal_(std=0.3)
    rows, by, slots = torch.randn(ROWS, HIDDEN), norm(), torch.arange(ROWS)
    slots[2] = -1
    x = by(rows)
    expected = rows + block.experts(x, *block.router(x, slots))
    if block.shared is not None:
        expected += block.shared(x)
    stream = ResidualStream(rows.clone())
    block(stream, by, slots)
    assert isinstance(stream._waiting, Tensor if shared else PairOutputs)
    torch.testing.assert_close(stream.read(None), expected)
