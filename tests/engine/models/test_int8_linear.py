"""Models whose layers keep INT8 weights, here in plain torch: what they hold means what the
checkpoint means, on any rank, and what they compute is as near as INT8 can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import Dtype, EngineConfig
from engine.layers.feed_forward.sparse_mlp import Experts
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.base import LinearLayer
from engine.layers.methods.formats.weight_format import Dequantised
from engine.layers.methods.plain.plain import Plain
from engine.layers.methods.quantised.int8_linear import Int8Linear, Int8WeightLinear
from engine.models.base import CausalLM
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.parallel.place import ExpertRanks, ParallelPlace
from tandem_kernels.reference.int8 import int8_dequantise, quantise_int8
from tests.engine.models.int8_checkpoints import LAYOUTS, MakePair
from tests.engine.models.paged_model import PagedModel
from tests.engine.models.parity_cases import prompts
from tests.engine.models.quantised_checkpoints import quantise_checkpoint
from tests.engine.parallel.fake_group import FakeGroup

LINEAR = MergedColumnParallelLinear | RowParallelLinear
POLICY = GemmPolicy(int8=True, int8_rows=8)

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def keeps_int8(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns what makes models keep integers from then on."""

    def keep() -> None:
        monkeypatch.setattr(GemmPolicy, "choose", classmethod(lambda *_: POLICY))

    return keep


def load(
    folder: Path,
    rank: int = 0,
    size: int = 1,
    *,
    dtype: Dtype = "float32",
    device: str = "cpu",
    spreads_experts: bool = False,
) -> tuple[EngineConfig, CausalLM]:
    config = EngineConfig(engine_id="int8", epoch=1, model=load_model_config(folder, dtype=dtype))
    ranks = ExpertRanks(rank, size, are_whole=True) if spreads_experts else None
    place = ParallelPlace(range(config.model.num_layers), FakeGroup(rank, size), ep=ranks)
    model = create_model(config, place, device)
    load_weights(model, config, lambda fraction: None)
    return config, model


def weight_of(layer: LinearLayer) -> Tensor:
    """Returns the weights as they are meant, in float32."""
    if isinstance(layer.method, Int8Linear):
        return layer.weight.float() * layer.weight_scale[:, None]
    if isinstance(layer.method, Int8WeightLinear):
        held = layer.weight, layer.weight_scale, layer.weight_zero
        return int8_dequantise(*held, torch.float32)
    return layer.weight.float()


_METHODS: dict[str, type[object]] = {
    "w8a8": Int8Linear,
    "w8a8 static": Int8Linear,
    "w8a8 tensors": Int8Linear,
    "w8a8 asymmetric inputs": Int8WeightLinear,
    "w8a16 channels": Int8WeightLinear,
    "w8a16 asymmetric": Int8WeightLinear,
    "gptq": Int8WeightLinear,
    "gptq ordered": Dequantised,
    "modelopt sq": Dequantised,
}


@pytest.mark.parametrize("layout", _METHODS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_layers_hold_what_the_numbers_mean(
    layout: str,
    rank: int,
    size: int,
    make_int8_pair: MakePair,
    keeps_int8: Callable[[], None],
) -> None:
    """Layers whose groups ranks would cut are plain: the 48 inputs of each of two ranks."""
    quantised, plain = make_int8_pair("llama", layout)
    expected = dict(load(plain, rank, size)[1].named_modules())
    keeps_int8()
    found = dict(load(quantised, rank, size)[1].named_modules())
    methods = set()
    for name, layer in found.items():
        if isinstance(layer, LINEAR):
            same = expected[name]
            assert isinstance(same, LINEAR)
            assert torch.equal(weight_of(layer), same.weight), name
            is_cut = size == 2 and layout in ("w8a16 asymmetric", "gptq")
            if not (is_cut and name.endswith("down_proj")):
                methods.add(type(layer.method))
    assert methods == {_METHODS[layout]}


@pytest.mark.parametrize("layout", ["w8a8", "w8a16 channels"])
@pytest.mark.parametrize("spreads", [False, True], ids=["slices", "whole"])
def test_experts_hold_what_the_numbers_mean(
    layout: str,
    spreads: bool,
    make_int8_pair: MakePair,
    keeps_int8: Callable[[], None],
) -> None:
    quantised, plain = make_int8_pair("mixtral", layout)
    expected = _experts(load(plain)[1])
    keeps_int8()
    ranks = [_experts(load(quantised, r, 2, spreads_experts=spreads)[1]) for r in (0, 1)]
    for rank in ranks:
        first = rank.w13.float() * rank.s13[..., None]
        second = rank.w2.float() * rank.s2[..., None]
        sizes = rank.sizes
        for own, expert in enumerate(sizes.held):
            units = slice(sizes.start, sizes.start + sizes.width)
            whole = expected.w13[expert].chunk(2)
            assert torch.equal(first[own], torch.cat([part[units] for part in whole]))
            assert torch.equal(second[own], expected.w2[expert][:, units])
    held = [expert for rank in ranks for expert in rank.sizes.held]
    assert held == ([0, 1, 2, 3] if spreads else [0, 1, 2, 3] * 2)


def _experts(model: nn.Module) -> Experts:
    return next(module for module in model.modules() if isinstance(module, Experts))


def test_experts_in_groups_are_dequantised(
    make_int8_pair: MakePair,
    keeps_int8: Callable[[], None],
) -> None:
    keeps_int8()
    assert _experts(load(make_int8_pair("mixtral", "gptq")[0])[1]).w13.dtype == torch.float32


class _Emulated(Plain):
    """Computes in float32 with inputs as int8 has them."""

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        numbers, scales = quantise_int8(x)
        return F.linear(numbers.float() * scales.t(), layer.weight, layer.bias)


def _logits(loaded: tuple[EngineConfig, CausalLM], device: str = "cpu") -> Tensor:
    return torch.cat(PagedModel(*loaded, device).prefill(prompts()[:4], 13)).cpu()


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


@devices
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mixtral"])
def test_logits_are_as_near_as_int8_can_be(
    family: str,
    device: str,
    make_int8_pair: MakePair,
    keeps_int8: Callable[[], None],
) -> None:
    """Against the same weights in plain numbers, in float32. The yardstick for how much error is
    natural are the same integers multiplied exactly, in a model that rounds to bfloat16."""
    quantised, plain = make_int8_pair(family, "w8a8")
    exact = _logits(load(plain))
    config, model = load(plain)
    for layer in model.modules():
        if isinstance(layer, LINEAR):
            layer.method = _Emulated()
    of_integers = relative_error(_logits((config, model)), exact)
    of_halves = relative_error(_logits(load(plain, dtype="bfloat16")), exact)
    keeps_int8()
    ours = _logits(load(quantised, dtype="bfloat16", device=device), device)
    assert relative_error(ours, exact) < 1.5 * (of_integers + of_halves) < 0.25


@devices
@pytest.mark.parametrize("layout", ["w8a16 channels", "w8a16 asymmetric", "gptq"])
def test_logits_beside_inputs_in_half_precision(
    layout: str,
    device: str,
    make_int8_pair: MakePair,
    keeps_int8: Callable[[], None],
) -> None:
    """Up to 8 rows are multiplied by integers, more by weights that are written out."""
    quantised, plain = make_int8_pair("qwen2", layout)
    exact = _logits(load(plain))
    natural = relative_error(_logits(load(plain, dtype="bfloat16")), exact)
    keeps_int8()
    ours = _logits(load(quantised, dtype="bfloat16", device=device), device)
    assert relative_error(ours, exact) < 1.5 * natural < 0.15


def test_deterministic_mode_and_smoothed_layers_dequantise(
    checkpoints: Path, tmp_path: Path
) -> None:
    assert not GemmPolicy(deterministic=True).int8
    writer, config = LAYOUTS["w8a8"]
    quantised = tmp_path / "quantised"
    quantise_checkpoint(checkpoints / "llama", quantised, tmp_path / "plain", writer, config)
    layers = [layer for layer in load(quantised)[1].modules() if isinstance(layer, LINEAR)]
    assert layers and all(isinstance(layer.method, Dequantised) for layer in layers)
