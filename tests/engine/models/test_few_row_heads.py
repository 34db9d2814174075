"""Attention's front in one launch does what norm, projection, rotation and cache do apart."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.head_sizes import HeadSizes
from engine.layers.attention.block import AttentionBlock, AttentionOptions
from engine.layers.attention.layer import AttentionInputs
from engine.layers.attention.paged import PagedBackend
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.lora import AdapterTokens, WithAdapters
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import E4M3, KVScales
from tandem_kernels.lora.lora_gemm_shapes import num_counters

HIDDEN, HEAD_DIM, HEADS, KV_HEADS, BLOCK_SIZE, ROWS = 48, 16, 4, 2, 4, 2
NUM_OUTPUTS = (HEADS + 2 * KV_HEADS) * HEAD_DIM
CPU = torch.device("cpu")


class Layer:
    """An attention block behind its norm, with random weights, and one decode of `ROWS` requests,
    of which the second is padding."""

    def __init__(self, rows: int, norm_offset: float = 0.0, **options: Any) -> None:
        torch.manual_seed(2)
        policy = GemmPolicy(few_row_heads=rows)
        shard = Shard(ParallelPlace(range(1)), torch.bfloat16, CPU, policy)
        self.norm = RMSNorm(HIDDEN, 1e-5, shard, offset=norm_offset)
        sizes = HeadSizes.alike(HEADS, KV_HEADS, HEAD_DIM)
        self.block = AttentionBlock(HIDDEN, sizes, shard, AttentionOptions(**options))
        for parameter in (*self.norm.parameters(), *self.block.parameters()):
            parameter.data.normal_(std=0.3)
        dtype = torch.bfloat16 if options.get("kv_scales") is None else E4M3
        self.cache = torch.randn(5, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
        self.angles = torch.randn(16, HEAD_DIM)
        self.given = torch.randn(2, ROWS, HIDDEN).bfloat16()

    def attended(self, *, waits: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the stream behind the block and its cache in one, and of each launch for all the
        norm's weight. `waits`: something is to be added in front."""
        lengths = torch.tensor([6, 3]).int()
        metadata = AttentionMetadata(
            torch.tensor([[3, 1], [2, 0]]).int(), torch.arange(3).int(), lengths, ROWS, 1, 6
        )
        inputs = AttentionInputs(
            torch.tensor([5, 2]), self.angles, torch.tensor([5, -1]), metadata, PagedBackend()
        )
        stream, seen = ResidualStream(self.given[0].clone()), []
        if waits:
            stream.add(self.given[1].clone())

        def recording(*args: Any) -> Tensor:
            seen.append(args[7])
            return op(*args)

        op = ops.few_row_qkv
        with patch.object(ops, "few_row_qkv", recording), torch.inference_mode():
            rows = stream.read_unnormed(self.norm, self.block.input_form)
            self.block(rows, stream, self.cache, inputs)
        return torch.cat((stream.value().flatten(), self.cache.flatten().float())), seen


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_one_launch_gives_what_three_do(bias: bool, waits: bool) -> None:
    """The kernel that adds what waits norms the rows, so then the launch does not."""
    expected, apart = Layer(0, bias=bias).attended(waits=waits)
    layer = Layer(ROWS, bias=bias)
    before = layer.cache.clone()
    found, (norm_weight,) = layer.attended(waits=waits)
    assert apart == [] and _error(found, expected) < 1e-2
    assert norm_weight is (None if waits else layer.norm.weight)
    changed = (layer.cache != before).any(-1).nonzero().tolist()
    assert changed == [[1, part, head, 1] for part in (0, 1) for head in range(KV_HEADS)]


SCALES = KVScales(*(torch.full((KV_HEADS,), 0.5) for _ in range(2)))


@pytest.mark.parametrize(
    "options",
    [
        {"head_norm": "each"},
        {"head_norm": "all"},
        {"output_gate": "paired"},
        {"kv_scales": SCALES},
        {"norm_offset": 1.0},
    ],
    ids=["norm of heads", "norm of all heads", "gates", "FP8 cache", "exact norm"],
)
def test_other_layers_are_computed_apart(options: dict[str, Any]) -> None:
    expected, _ = Layer(0, **options).attended()
    found, launches = Layer(ROWS, **options).attended()
    assert launches == [] and torch.equal(found, expected)


def test_more_rows_are_computed_apart() -> None:
    assert Layer(ROWS - 1).attended()[1] == []


def test_tokens_with_adapters_are_computed_apart() -> None:
    layer, tokens = Layer(ROWS), AdapterTokens()
    a, b = torch.randn(3, 6, HIDDEN).bfloat16(), torch.randn(3, NUM_OUTPUTS, 2).bfloat16()
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    linear = layer.block.qkv_proj
    counters = torch.zeros(num_counters(NUM_OUTPUTS), dtype=torch.int32)
    linear.method = WithAdapters(
        linear.method, tokens, a, b, (q, q + kv, q + 2 * kv), counters, fixed_order=False
    )
    plain, launches = layer.attended()
    assert len(launches) == 1
    tokens.slots = torch.tensor([1, -1], dtype=torch.int32)
    adapted, launches = layer.attended()
    assert launches == [] and _error(adapted, plain) > 0.05
