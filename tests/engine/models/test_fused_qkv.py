"""Queries, keys and values of many rows: when one GEMM rotates them and writes the cache."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from engine.head_sizes import HeadSizes
from engine.layers.attention.block import AttentionBlock, AttentionOptions
from engine.layers.attention.layer import AttentionInputs
from engine.layers.attention.paged import PagedBackend
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata

HIDDEN, HEAD_DIM, HEADS, KV_HEADS, BLOCK_SIZE, MANY = 256, 64, 8, 4, 16, 40
CPU = torch.device("cpu")


def behind(rows: int, fused_from: int, **options: bool) -> tuple[Tensor, Tensor]:
    """Returns the stream and the cache behind the attention of a prompt of `rows` tokens."""
    torch.manual_seed(4)
    policy = GemmPolicy(fused_qkv_rows=fused_from)
    shard = Shard(ParallelPlace(range(1)), torch.bfloat16, CPU, policy)
    norm = RMSNorm(HIDDEN, 1e-5, shard)
    block = AttentionBlock(
        HIDDEN,
        HeadSizes.alike(HEADS, KV_HEADS, HEAD_DIM),
        shard,
        AttentionOptions(eps=1e-5, **options),
    )
    for parameter in (*norm.parameters(), *block.parameters()):
        parameter.data.normal_(std=0.2)
    num_blocks = -(-rows // BLOCK_SIZE)
    cache = torch.zeros(num_blocks + 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).bfloat16()
    metadata = AttentionMetadata(
        torch.arange(1, num_blocks + 1).int()[None],
        torch.tensor([0, rows]).int(),
        torch.tensor([rows]).int(),
        num_decodes=0,
        max_query_len=rows,
        max_seq_len=rows,
    )
    places = torch.arange(rows)
    inputs = AttentionInputs(
        places, torch.randn(rows, HEAD_DIM), places + BLOCK_SIZE, metadata, PagedBackend()
    )
    stream = ResidualStream(torch.randn(rows, HIDDEN).bfloat16())
    with torch.inference_mode():
        block(stream.read_unnormed(norm, block.input_form), stream, cache, inputs)
        return stream.read(None), cache


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "fused_from", "together"),
    [(MANY, MANY, True), (MANY - 1, MANY, False), (MANY, 0, False)],
)
def test_from_so_many_rows_on(
    monkeypatch: pytest.MonkeyPatch, rows: int, fused_from: int, together: bool, bias: bool
) -> None:
    expected = behind(rows, 0, bias=bias)
    own = Mock(side_effect=ops.fused_qkv)
    monkeypatch.setattr(ops, "fused_qkv", own)
    for found, known in zip(behind(rows, fused_from, bias=bias), expected, strict=True):
        assert torch.equal(found, known)
    assert own.called == together


@pytest.mark.parametrize("option", [{"head_norm": "each"}, {"output_gate": "paired"}], ids=str)
def test_other_heads_are_rotated_apart(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, bool]
) -> None:
    monkeypatch.setattr(ops, "fused_qkv", Mock(side_effect=AssertionError))
    assert behind(MANY, MANY, **option)[0].isfinite().all()
