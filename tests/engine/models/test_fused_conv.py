"""Layers that keep a state project and convolve few rows in one launch: what they add, and what
they keep, is the same, and steps that the launch does not take go their own way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.layers.gemm_policy import GemmPolicy
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.layers.states.linear_attention import DeltaSizes, GatedDeltaNet
from engine.layers.states.mamba import MambaMixer, MambaSizes
from engine.layers.states.state_pages import StateInputs
from engine.parallel.place import ParallelPlace
from engine.quantization import Quantization
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import StateMetadata

HIDDEN = 64
DELTA = DeltaSizes(key_heads=2, value_heads=4, key_dim=16, value_dim=16, kernel=4)
STATE_BYTES, CONV_BYTES = 4 * 16 * 16 * 4, 128 * 3 * 2
"""Both layers have as many."""
MAMBA = MambaSizes(heads=4, groups=2, head_dim=16, size=16, kernel=4, conv_bias=True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists how steps are convolved."""
    done: list[str] = []
    for name in ("few_row_conv", "causal_conv"):
        op = getattr(ops, name)

        def noted(*args: object, op: ops.Op = op, **options: object) -> object:  # type: ignore[type-arg]
            done.append(op.__name__)
            return op(*args, **options)

        monkeypatch.setattr(ops, name, noted)
    return done


def made(is_mamba: bool, few_rows: int) -> GatedDeltaNet | MambaMixer:
    """Makes a layer, the same numbers each time."""
    shard = Shard(
        ParallelPlace(range(1)), torch.bfloat16, torch.device("cpu"),
        GemmPolicy(few_rows=few_rows), Quantization(method="test", rules=(), ignored=()),
    )  # fmt: skip
    layer: GatedDeltaNet | MambaMixer
    layer = (
        MambaMixer(HIDDEN, MAMBA, 1e-5, shard)
        if is_mamba
        else GatedDeltaNet(HIDDEN, DELTA, 1e-5, shard)
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.normal_(std=0.3, generator=generator)
    return layer


def added(
    layer: GatedDeltaNet | MambaMixer, rows: int, metadata: StateMetadata
) -> tuple[Tensor, Tensor]:
    """Returns the stream behind the layer, and the last inputs that it keeps."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
    pages = torch.zeros(6, STATE_BYTES + CONV_BYTES, dtype=torch.uint8)
    kept = layer.views(pages, torch.bfloat16)
    for part in kept:
        part.normal_(generator=generator)
    stream = ResidualStream(x.clone())
    slots = torch.zeros(rows, dtype=torch.int64)
    layer(x, stream, pages, StateInputs(slots, metadata))
    return stream.read(None), kept[1]


def decodes(*seq_lens: int) -> StateMetadata:
    count = len(seq_lens)
    starts = torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return StateMetadata(starts[1:], starts, lengths, count)


@pytest.mark.parametrize("is_mamba", [False, True], ids=["delta rule", "mamba"])
@torch.inference_mode()
def test_one_launch_does_what_two_do(is_mamba: bool, launched: list[str]) -> None:
    """A decode begins, and another is padding."""
    fused, plain = made(is_mamba, few_rows=16), made(is_mamba, few_rows=0)
    batch = decodes(9, 1, 0)
    expected, expected_inputs = added(plain, 3, batch)
    assert launched == ["causal_conv"]
    launched.clear()
    found, inputs = added(fused, 3, batch)
    assert launched[0] == "few_row_conv"
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(inputs, expected_inputs, rtol=1e-2, atol=1e-2)
    assert torch.equal(inputs[[0, 3, 4]], expected_inputs[[0, 3, 4]])


@torch.inference_mode()
def test_other_steps_take_two_launches(launched: list[str]) -> None:
    """More rows, and prompts."""
    layer = made(is_mamba=False, few_rows=16)
    added(layer, 5, decodes(4, 5, 6, 7, 8))
    prompt = StateMetadata(
        torch.tensor([1], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32), 0,
    )  # fmt: skip
    added(layer, 3, prompt)
    assert launched == ["causal_conv", "causal_conv"]
