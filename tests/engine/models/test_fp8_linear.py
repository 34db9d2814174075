"""Models whose linear layers compute with FP8 weights and FP8 inputs, here in plain torch: what
they hold means what the checkpoint means, on any rank, and what they compute is as near as FP8 can
be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import Dtype, EngineConfig
from engine.head_sizes import HeadSizes
from engine.layers.feed_forward.mlp import GatedMLP
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import (
    GateUpParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from engine.layers.methods.base import LinearLayer
from engine.layers.methods.formats.weight_format import Dequantised
from engine.layers.methods.plain.plain import Plain
from engine.layers.methods.quantised.fp8_linear import Fp8BlockLinear, Fp8Linear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.layers.states.linear_attention import DeltaSizes, GatedDeltaNet
from engine.models.base import CausalLM
from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.factory import _tell_of_plain_layers, create_model
from engine.models.loader import load_weights
from engine.models.weights.dummy_weights import fill_dummy
from engine.parallel.place import ParallelPlace
from engine.quantization import Fp8Scheme, Quantization, SchemeRule
from kv_transfer.planes import HeadRange
from tandem_kernels.reference.fp8 import dequantise_rows, dequantise_weight, quantise_fp8
from tests.engine.models.paged_model import PagedModel
from tests.engine.models.parity_cases import prompts
from tests.engine.models.quantised_checkpoints import (
    FP8_TENSORS,
    Writer,
    compressed_tensors,
    quantise_checkpoint,
    write_fp8_channels,
    write_fp8_tensors,
)
from tests.engine.parallel.fake_group import FakeGroup

POLICY = GemmPolicy(fp8=True)
LINEAR = MergedColumnParallelLinear | RowParallelLinear


@pytest.fixture
def computes_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GemmPolicy, "choose", classmethod(lambda *_: POLICY))


def load(
    folder: Path,
    rank: int = 0,
    size: int = 1,
    *,
    online: bool = False,
    dtype: Dtype = "bfloat16",
    device: str = "cpu",
) -> tuple[EngineConfig, CausalLM]:
    model = load_model_config(folder, dtype=dtype, quantization="fp8" if online else None)
    config = EngineConfig(engine_id="fp8", epoch=1, model=model)
    place = ParallelPlace(range(model.num_layers), FakeGroup(rank, size))
    created = create_model(config, place, device)
    load_weights(created, config, lambda fraction: None)
    return config, created


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns every linear layer's weights as they are meant, in float32."""
    return {
        name: dequantise_weight(layer.weight, layer.weight_scale)
        if isinstance(layer.method, Fp8Linear)
        else layer.weight.float()
        for name, layer in model.named_modules()
        if isinstance(layer, LINEAR)
    }


@pytest.mark.parametrize(
    ("writer", "config"),
    [
        (write_fp8_channels, compressed_tensors({"strategy": "channel"})),
        (write_fp8_tensors, FP8_TENSORS),
    ],
    ids=["channels", "tensors"],
)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "deepseek_v3_yarn"])
def test_every_rank_holds_what_the_checkpoint_means(
    family: str,
    writer: Writer,
    config: dict[str, object],
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(checkpoints / family, quantised, plain, writer, config)
    for rank, size in ((0, 1), (1, 2)):
        expected = weights_of(load(plain, rank, size)[1])
        with monkeypatch.context() as patch:
            patch.setattr(GemmPolicy, "choose", classmethod(lambda *_: POLICY))
            _, model = load(quantised, rank, size)
        assert any(layer.dtype == torch.float8_e4m3fn for layer in model.parameters())
        for name, weight in weights_of(model).items():
            assert torch.equal(weight.bfloat16().float(), expected[name]), name


@pytest.mark.usefixtures("computes_in_fp8")
def test_online_every_rank_cuts_from_the_same_weights(checkpoints: Path) -> None:
    """Scales are of whole outputs, also where ranks share the inputs."""
    whole = weights_of(load(checkpoints / "llama", online=True)[1])
    parts = [weights_of(load(checkpoints / "llama", r, 2, online=True)[1]) for r in range(2)]
    name = "layers.1.mlp.down_proj"
    assert torch.equal(torch.cat([part[name] for part in parts], dim=1), whole[name])
    gate_up = [part["layers.1.mlp.gate_up_proj"].chunk(2) for part in parts]
    both = torch.cat([torch.cat(halves) for halves in zip(*gate_up, strict=True)])
    assert torch.equal(both, whole["layers.1.mlp.gate_up_proj"])


class _Emulated(Plain):
    """Computes in float32 with inputs as e4m3 has them."""

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return F.linear(dequantise_rows(*quantise_fp8(x)), layer.weight, layer.bias)


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "olmo2"])
def test_logits_are_as_near_as_fp8_can_be(
    family: str, device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same weights in plain numbers, in float32. The yardstick for how much error is
    natural are the same numbers of e4m3 multiplied exactly."""

    def logits(loaded: tuple[EngineConfig, CausalLM], device: str = "cpu") -> Tensor:
        return torch.cat(PagedModel(*loaded, device).prefill(prompts()[:4], 13)).cpu()

    folder = checkpoints / family
    exact = logits(load(folder, online=True, dtype="float32"))
    config, model = load(folder, online=True, dtype="float32")
    for layer in model.modules():
        if isinstance(layer, LINEAR):
            layer.method = _Emulated()
    natural = relative_error(logits((config, model)), exact)
    monkeypatch.setattr(GemmPolicy, "choose", classmethod(lambda *_: POLICY))
    ours = logits(load(folder, online=True, device=device), device)
    assert relative_error(ours, exact) < 1.5 * natural
    assert 0.01 < natural < 0.15


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


SCHEME = Fp8Scheme(scales="block", block=(128, 128), scale_name="weight_scale_inv")
BLOCKS = Quantization(method="fp8", rules=(SchemeRule(("Linear",), SCHEME),))


def block_shard(rank: int = 0, size: int = 1, device: str = "cpu") -> Shard:
    place = ParallelPlace(range(1), FakeGroup(rank, size))
    return Shard(place, torch.bfloat16, torch.device(device), POLICY, BLOCKS, "model")


@devices
@pytest.mark.parametrize("rows", [7, 70])
def test_a_block_of_layers_with_scales_of_blocks(rows: int, device: str) -> None:
    """Norm, gate·up, activation and down projection, against the same weights in float32."""
    mlp = GatedMLP(256, 384, block_shard(device=device))
    in_float32 = Shard(ParallelPlace(range(1)), torch.float32, torch.device(device))
    plain = GatedMLP(256, 384, in_float32)
    sources = list(mlp.checkpoint_weights("model.mlp", is_fused=False))
    fill_dummy(sources, lambda fraction: None)
    norm = RMSNorm(256, 1e-5, block_shard(device=device))
    norm.weight.fill_(1.0)
    for ours, theirs in ((mlp.gate_up_proj, plain.gate_up_proj), (mlp.down_proj, plain.down_proj)):
        assert isinstance(ours.method, Fp8BlockLinear)
        assert ours.weight_scale.shape[1] % 4 == 0
        ours.weight_scale.mul_(1 + torch.rand_like(ours.weight_scale))
        theirs.weight.copy_(dequantise_weight(ours.weight, ours.weight_scale))
    x = torch.randn(rows, 256, device=device)
    stream, exact = ResidualStream(x.bfloat16()), ResidualStream(x.bfloat16().float())
    mlp(stream.read_rows(norm, mlp.input_form), stream)
    norm.weight.data = norm.weight.float()
    plain(exact.read(norm), exact)
    added, expected = (part.read(None).float() - x for part in (stream, exact))
    assert 0.01 < relative_error(added, expected) < 0.06


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (lambda: RowParallelLinear(512, 256, block_shard(0, 2)), Fp8BlockLinear),
        (lambda: RowParallelLinear(384, 256, block_shard(1, 2)), Dequantised),
        (lambda: GateUpParallelLinear(256, 384, block_shard(1, 3)), Fp8BlockLinear),
        (lambda: GateUpParallelLinear(256, 384, block_shard(1, 2)), Dequantised),
    ],
    ids=["inputs", "cut inputs", "outputs", "cut outputs"],
)
def test_ranks_that_cut_blocks_dequantise(make: Callable[[], LINEAR], method: type[object]) -> None:
    assert isinstance(make().method, method)


@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_of_scales_follow_outputs_that_change_places(rank: int) -> None:
    """A gate behind each query head, and four kinds of outputs behind each key head, become parts
    of their own: blocks move, and their scales with them."""
    turned = (*range(64), *range(128, 192), *range(64, 128), *range(192, 256))
    for head_order, method in ((None, Fp8BlockLinear), (torch.tensor(turned), Dequantised)):
        qkv = QKVParallelLinear(
            128, HeadSizes.alike(4, 2, 256), HeadRange(rank, 1), block_shard(rank, 2), bias=False,
            head_order=head_order, gates="paired",
        )  # fmt: skip
        assert isinstance(qkv.method, method)
    sizes = DeltaSizes(key_heads=4, value_heads=8, key_dim=128, value_dim=128, kernel=4)
    layer = GatedDeltaNet(128, sizes, 1e-6, block_shard(rank, 2)).in_proj
    assert isinstance(layer.method, Fp8BlockLinear)
    whole = torch.randn(4 * 6 * 128, 128).bfloat16()
    blocks = whole.view(-1, 128, 128).abs().amax((1, 2), keepdim=True).float() / 448
    numbers = (whole.view(-1, 128, 128).float() / blocks).flatten(0, 1).to(torch.float8_e4m3fn)
    (weight,) = layer.checkpoint_weights("in_proj_qkvz")
    held = slice(rank * 2 * 6, (rank + 1) * 2 * 6)
    assert weight.fill is not None
    weight.fill(numbers.view(-1, 128, 128)[held].flatten(0, 1), blocks.view(-1, 1)[held])
    found = dequantise_weight(layer.weight, layer.weight_scale).view(-1, 128, 128)
    meant = (numbers.view(-1, 128, 128).float() * blocks)[held]
    # Of each key head q, k, two of v and two of z; ours has those of both heads behind each other.
    order = [0, 6, 1, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    torch.testing.assert_close(found, meant[order], rtol=0, atol=0)


def test_deterministic_mode_dequantises(checkpoints: Path) -> None:
    """Its GEMMs, which do not depend on the batch, take plain numbers."""
    assert not GemmPolicy(deterministic=True).fp8
    _, model = load(checkpoints / "llama", online=True)
    layers = [layer for layer in model.modules() if isinstance(layer, LINEAR)]
    assert layers and all(isinstance(layer.method, Dequantised) for layer in layers)


def test_a_gpu_tells_which_layers_it_holds_in_plain_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = torch.nn.ModuleList(
        RowParallelLinear(inputs, 256, block_shard(1, 2).at("down_proj")) for inputs in (384, 512)
    )
    _tell_of_plain_layers(layers)
    assert "1 quantised linear layers are dequantised" in caplog.text
    assert "model.down_proj" in caplog.text


def test_what_the_operator_says_must_be_what_the_checkpoint_says(checkpoints: Path) -> None:
    plain = checkpoints / "llama"
    online = load_model_config(plain, quantization="fp8")
    assert online.quantization is not None and online.quantization.method == "fp8"
    assert online.model_hash != load_model_config(plain).model_hash
    with pytest.raises(CheckpointError, match="by nothing, but --quantization is awq"):
        load_model_config(plain, quantization="awq")
