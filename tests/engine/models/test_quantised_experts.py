"""Experts of quantised checkpoints: kept in their format they hold what the numbers mean, on any
rank, and two nodes answer as the plain weights do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.layers.expert_methods import choice
from engine.layers.expert_methods.base import ExpertLayer, ExpertMethod
from engine.layers.expert_methods.fp4 import Fp4Experts
from engine.layers.expert_methods.fp8 import Fp8Experts
from engine.layers.expert_methods.plain import PlainExperts
from engine.layers.feed_forward.expert_share import ExpertShare
from engine.layers.feed_forward.sparse_mlp import Experts
from engine.layers.methods.quantised.fp4_tiling import ScaleError
from engine.layers.methods.registry import UnsupportedScheme
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from engine.quantization import Fp8Scheme, Mxfp4Scheme, Quantization, SchemeRule
from kv_transfer.config import KVTransferConfig
from tandem_kernels.gemm.fp4_tiles import untile_fp4
from tandem_kernels.reference import quantised_experts
from tandem_kernels.reference.fp8 import dequantise_weight
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over
from tests.engine.models.gpt_oss_family import GPT_OSS_FAMILIES, publish
from tests.engine.models.parity_cases import prompts
from tests.engine.models.quantised_checkpoints import (
    FP8_BLOCKS,
    FP8_TENSORS,
    Writer,
    compressed_tensors,
    quantise_checkpoint,
    write_fp8_blocks,
    write_fp8_channels,
    write_fp8_tensors,
)
from tests.engine.models.rank_process import make_paged_model
from tests.engine.models.reference_models import GreedyAnswers, reference, save_checkpoint
from tests.engine.parallel.fake_group import FakeGroup

LAYOUTS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "blocks": (write_fp8_blocks((128, 128)), FP8_BLOCKS),
    "channels": (write_fp8_channels, compressed_tensors({"strategy": "channel"})),
    "tensors": (write_fp8_tensors, FP8_TENSORS),
}
MakePair = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture
def make_pair(checkpoints: Path, tmp_path: Path) -> MakePair:
    """Writes a family quantised, and plain with the same meaning."""

    def make(family: str, layout: str) -> tuple[Path, Path]:
        writer, config = LAYOUTS[layout]
        quantised, plain = tmp_path / "quantised", tmp_path / "plain"
        left = "mlp.gate.", "block_sparse_moe.gate."
        quantise_checkpoint(checkpoints / family, quantised, plain, writer, config, left)
        return quantised, plain

    return make


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes experts stay in FP8 and in MXFP4, which plain torch then computes with."""
    monkeypatch.setitem(choice.EXPERTS, Fp8Scheme, lambda scheme, shard: Fp8Experts(scheme))
    monkeypatch.setitem(choice.EXPERTS, Mxfp4Scheme, lambda scheme, shard: Fp4Experts(scheme))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns gpt-oss as it is published, and what that means in plain numbers."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    save_checkpoint(GPT_OSS_FAMILIES["gpt_oss"], folder / "first")
    publish(folder / "first", folder / "published", folder / "meant")
    return folder / "published", folder / "meant"


def experts_of(folder: Path, rank: int, size: int) -> list[Experts]:
    config = EngineConfig(engine_id="load", epoch=1, model=load_model_config(folder))
    config = replace(config, model=replace(config.model, dtype="float32"))
    place = ParallelPlace(range(config.model.num_layers), FakeGroup(rank, size))
    model = create_model(config, place, "cpu")
    load_weights(model, config, lambda fraction: None)
    return [module for module in model.modules() if isinstance(module, Experts)]


def meaning(layer: ExpertLayer, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gate, up and down projection of an expert, in plain numbers."""
    hidden, width = layer.sizes.hidden, layer.sizes.width
    if layer.w13.dtype == torch.int32:
        f13, f2 = (None, None) if layer.f13 is None else layer.f13[expert], layer.f2
        gate, up = (untile_fp4(layer.w13[expert, i], width, hidden, f13[i]) for i in (0, 1))
        factor = None if f2 is None else f2[expert]
        return gate, up, untile_fp4(layer.w2[expert], hidden, width, factor)
    if layer.w13.dim() == 3:
        gate, up = layer.w13[expert].split(width)
        return gate, up, layer.w2[expert]
    gate, up = (dequantise_weight(layer.w13[expert, i], layer.s13[expert, i]) for i in (0, 1))
    return gate, up, dequantise_weight(layer.w2[expert], layer.s2[expert])


@pytest.mark.parametrize(
    ("family", "layout", "size"),
    [
        ("mixtral", "blocks", 1),
        ("glm4_moe", "channels", 2),
        ("deepseek_v3_yarn", "blocks", 1),
        ("deepseek_v3_yarn", "tensors", 2),
    ],
)
@pytest.mark.usefixtures("kept")
def test_ranks_keep_what_the_numbers_mean(
    family: str, layout: str, size: int, make_pair: MakePair
) -> None:
    check_ranks(*make_pair(family, layout), size, torch.float8_e4m3fn)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("kept")
def test_ranks_keep_what_numbers_of_four_bits_mean(size: int, gpt_oss: tuple[Path, Path]) -> None:
    """The first of two ranks has 64 of 96 units."""
    ranks = check_ranks(*gpt_oss, size, torch.int32)
    assert [rank.sizes.width for rank in ranks] == ([96] if size == 1 else [64, 32])


def check_ranks(quantised: Path, plain: Path, size: int, dtype: torch.dtype) -> list[Experts]:
    """Compares all experts of all ranks with plain ones. Returns the first layer of each rank."""
    expected = experts_of(plain, 0, 1)
    ranks = [experts_of(quantised, rank, size) for rank in range(size)]
    assert len(expected) == len(ranks[0]) > 0
    for of_ranks, whole in zip(zip(*ranks, strict=True), expected, strict=True):
        assert all(layer.w13.dtype == dtype for layer in of_ranks)
        for expert in range(whole.sizes.count):
            parts = zip(*(meaning(layer, expert) for layer in of_ranks), strict=True)
            for dim, part, plainly in zip((0, 0, 1), parts, meaning(whole, expert), strict=True):
                assert torch.equal(torch.cat(part, dim), plainly)
    return [layers[0] for layers in ranks]


@pytest.mark.usefixtures("kept")
def test_plain_weights_are_quantised_as_they_are_loaded() -> None:
    """A scale is of all inputs of an output, on any number of ranks."""
    scheme = Fp8Scheme(scales="channel", online=True)
    whole, *ranks = (
        layer_of(scheme, hidden=96, units=64, rank=rank, size=size)
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    parts = zip(*(meaning(layer, 1) for layer in ranks), strict=True)
    for dim, part, expected in zip((0, 0, 1), parts, meaning(whole, 1), strict=True):
        assert torch.equal(torch.cat(part, dim), expected)
    largest = whole.w2[1].float().abs().amax(1)
    assert (largest == 448).all()


@pytest.mark.usefixtures("kept")
def test_logits_of_experts_in_fp8(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the plain weights, but for what tokens lose in e4m3."""
    quantised, plain = make_pair("mixtral", "blocks")
    expected = logits(plain)
    assert 1e-3 < float((logits(quantised) - expected).norm() / expected.norm()) < 0.15
    monkeypatch.setattr(
        quantised_experts,
        "quantise_fp8",
        lambda x, group: (x, torch.ones(-(-x.shape[1] // group), len(x))),
    )
    torch.testing.assert_close(logits(quantised), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("kept")
def test_logits_of_experts_in_mxfp4(gpt_oss: tuple[Path, Path]) -> None:
    published, meant = gpt_oss
    torch.testing.assert_close(logits(published), logits(meant), rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("kept")
def test_an_exponent_beyond_the_tiles_is_refused_by_name(
    gpt_oss: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(gpt_oss[0], tmp_path / "large")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.experts.down_proj_scales"][3, 5, 1] = 130
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ScaleError, match=r"layers\.1.*down_proj_scales.* is 130, above 128"):
        experts_of(folder, 0, 1)


def logits(folder: Path) -> Tensor:
    return torch.cat(make_paged_model(folder, ParallelGroup(0, 1)).prefill(prompts()[:3], 13))


def test_two_nodes_answer_as_the_plain_weights_do(make_pair: MakePair) -> None:
    quantised, plain = make_pair("qwen3_moe_sharded", "blocks")
    with ExitStack() as stack:
        nodes = []
        for role, ranks in (("kv_producer", 2), ("kv_consumer", 1)):
            config = engine_config(
                load_model_config(quantised),
                block_size=16,
                num_blocks=160,
                tp_size=ranks,
                kv_transfer=KVTransferConfig(kv_role=role, num_streams=2),  # type: ignore[arg-type]
            )
            nodes.append(GroupedNode.start(config))
            stack.callback(nodes[-1].shutdown)
        asked = {str(index): prompt for index, prompt in enumerate(prompts())}
        hand_over(*nodes, asked, GreedyAnswers(reference(plain)))


def layer_of(
    scheme: Fp8Scheme, *, hidden: int, units: int, rank: int, size: int, count: int = 3
) -> Experts:
    """Makes a rank's experts, filled from a checkpoint that is the same for all ranks."""
    rules = (SchemeRule(("Linear",), scheme),)
    place = ParallelPlace(range(1), FakeGroup(rank, size))
    shard = Shard(
        place,
        torch.bfloat16,
        torch.device("cpu"),
        quantization=Quantization(method="test", rules=rules),
    )
    share = ExpertShare.of(count, place.expert_ranks)
    layer = Experts(share, hidden, units, shard.at("experts"))
    generator = torch.Generator().manual_seed(3)
    stored: dict[str, Tensor] = {}
    for weight in layer.checkpoint_weights("experts"):
        for part in weight.slices:
            whole = torch.rand(part.shape, generator=generator) + 0.1
            if "F8_E4M3" in part.stored:
                whole = (whole * 200).to(torch.float8_e4m3fn)
            stored[part.name] = whole
    for weight in layer.checkpoint_weights("experts"):
        fill_from(stored, weight)
    return layer


def fill_from(stored: dict[str, Tensor], weight: CheckpointWeight) -> None:
    assert weight.fill is not None
    cut = []
    for part in weight.slices:
        whole = stored[part.name]
        cut.append(whole if part.dim is None else whole.narrow(part.dim, part.start, part.count))
    weight.fill(*cut)


@pytest.mark.usefixtures("kept")
def test_ranks_have_whole_blocks_of_scales() -> None:
    """Three blocks on two ranks: the first has two."""
    scheme = Fp8Scheme(scales="block", block=(128, 128))
    whole, *ranks = (
        layer_of(scheme, hidden=256, units=384, rank=rank, size=size)
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    assert [rank.sizes.width for rank in ranks] == [256, 128]
    parts = zip(*(meaning(layer, 2) for layer in ranks), strict=True)
    for dim, part, expected in zip((0, 0, 1), parts, meaning(whole, 2), strict=True):
        assert torch.equal(torch.cat(part, dim), expected)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    chosen = torch.tensor([[0, 2]] * 4 + [[-1, -1]], dtype=torch.int32)
    weights = torch.rand(5, 2)
    total = sum(rank(x, weights, chosen).float() for rank in ranks)
    together = whole(x, weights, chosen).float()
    torch.testing.assert_close(total, together, rtol=2e-2, atol=2e-2 * float(together.max()))


@pytest.mark.usefixtures("kept")
def test_more_ranks_than_blocks_of_scales_are_refused() -> None:
    scheme = Fp8Scheme(scales="block", block=(128, 128))
    with pytest.raises(UnsupportedScheme, match=r"units of 128 cannot be shared by 4 ranks"):
        layer_of(scheme, hidden=128, units=384, rank=3, size=4)


@pytest.mark.parametrize(
    ("scheme", "device", "dtype"),
    [
        (Fp8Scheme(scales="channel"), "cpu", torch.bfloat16),
        (Fp8Scheme(scales="block", block=(32, 32)), "cuda", torch.bfloat16),
        (Fp8Scheme(scales="channel"), "cuda", torch.float32),
    ],
    ids=["no GPU", "other blocks", "float32"],
)
def test_what_no_kernel_takes_is_dequantised(
    scheme: Fp8Scheme, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "engine.layers.expert_methods.fp8.has_e4m3", lambda device: device.type == "cuda"
    )
    place = ParallelPlace(range(1), FakeGroup(0, 1))

    def method(on: str, kind: torch.dtype, how: Fp8Scheme) -> ExpertMethod:
        return choice.expert_method(Shard(place, kind, torch.device(on)), how, None)

    assert isinstance(method(device, dtype, scheme), PlainExperts)
    taken = Fp8Scheme(scales="block", block=(128, 128))
    assert isinstance(method("cuda", torch.bfloat16, taken), Fp8Experts)
