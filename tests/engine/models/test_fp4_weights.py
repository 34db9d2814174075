"""Tests that NVFP4, MXFP4 and MXFP8 of every layout are served as the weights that they mean, on
any rank: in plain numbers, and in tiles of four bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.layers.expert_methods import choice
from engine.layers.expert_methods.fp4 import Fp4Experts
from engine.layers.feed_forward.sparse_mlp import Experts
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.quantised.fp4_linear import Fp4Linear
from engine.layers.methods.quantised.fp4_tiling import ScaleError
from engine.models.quantization.reader import read_quantization
from engine.models.specs.base import UnsupportedField
from engine.parallel.distributed import ParallelGroup
from engine.quantization import Fp8Scheme, Mxfp4Scheme, Nvfp4Scheme, Quantization
from tandem_kernels import ops
from tandem_kernels.gemm.fp4_tiles import untile_fp4
from tests.engine.models.family import Family
from tests.engine.models.fp4_checkpoints import (
    LAYOUTS,
    QUARK_MXFP4,
    QUARK_NVFP4,
    ct_floats,
    fp_inputs,
    mixed,
    modelopt,
    quark,
    write_mixed,
)
from tests.engine.models.loaded_parameters import RANKS, check_same
from tests.engine.models.parity_cases import prompts
from tests.engine.models.quantised_checkpoints import quantise_checkpoint
from tests.engine.models.quark_checkpoints import quark_export, quark_layers, quark_numbers
from tests.engine.models.rank_process import make_paged_model
from tests.engine.models.reference_models import save_checkpoint
from tests.engine.models.test_int4_weights import model_of
from tests.engine.models.test_quantised_experts import check_ranks

Pair = tuple[Path, Path]
MakePair = Callable[..., Pair]
WIDE = Family(
    Qwen2ForCausalLM,
    Qwen2Config,
    {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    },
)
"""Each of two ranks has whole tiles of all layers."""
FOUR_BITS = ["nvfp4", "w4a8_nvfp4_fp8", "ct nvfp4", "ct mxfp4", "quark"]


@pytest.fixture
def make_pair(checkpoints: Path, tmp_path: Path) -> MakePair:
    """Writes a family quantised, and plain with the same meaning."""

    def make(family: str, layout: str) -> Pair:
        writer, config = (write_mixed, mixed(3)) if layout == "mixed" else LAYOUTS[layout]
        quantised, plain = tmp_path / "quantised", tmp_path / "plain"
        left = ("mlp.gate.", "block_sparse_moe.gate.")
        folder = checkpoints / family
        if family == "wide":
            folder = tmp_path / family
            save_checkpoint(WIDE, folder)
        quantise_checkpoint(folder, quantised, plain, writer, config, left)
        return quantised, plain

    return make


@pytest.fixture
def tiled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes layers and experts keep tiles, which plain torch then computes with: up to 8 rows from
    them, more from weights that are written out."""
    policy = GemmPolicy(fp4_rows=8)
    monkeypatch.setattr(GemmPolicy, "choose", lambda *arguments: policy)
    for scheme in (Mxfp4Scheme, Nvfp4Scheme):
        monkeypatch.setitem(choice.EXPERTS, scheme, lambda scheme, shard: Fp4Experts(scheme))


def read(config: dict[str, Any]) -> Quantization:
    found = read_quantization(Path(), config)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", [*LAYOUTS, "mixed"])
def test_every_rank_loads_what_the_numbers_mean(layout: str, make_pair: MakePair) -> None:
    """Ranks cut inside of groups, too."""
    check_same(*make_pair("llama", layout))


@pytest.mark.parametrize("layout", ["nvfp4_awq", "ct nvfp4", "quark", "mxfp8"])
def test_every_rank_loads_what_numbers_of_experts_mean(layout: str, make_pair: MakePair) -> None:
    check_same(*make_pair("mixtral", layout))


@pytest.mark.parametrize(
    ("family", "layout", "num_tiled"),
    [
        *(("wide", layout, [8, 8, 8]) for layout in FOUR_BITS),
        ("llama", "nvfp4", [6, 6, 6]),
        ("llama", "quark", [6, 3, 3]),
    ],
)
@pytest.mark.usefixtures("tiled_on_cpu")
def test_tiles_hold_what_the_numbers_mean(
    family: str, layout: str, num_tiled: list[int], make_pair: MakePair
) -> None:
    """Layers whose parts are no whole tiles, or whose groups ranks would cut, are plain."""
    folders = make_pair(family, layout)
    found = []
    for rank, size in RANKS:
        quantised, plain = (dict(model_of(f, rank, size).named_modules()) for f in folders)
        found.append(0)
        for name, expected in plain.items():
            if not isinstance(expected, MergedColumnParallelLinear | RowParallelLinear):
                continue
            ours = quantised[name]
            assert isinstance(ours, MergedColumnParallelLinear | RowParallelLinear)
            if not isinstance(ours.method, Fp4Linear):
                assert torch.equal(ours.weight, expected.weight)
                continue
            found[-1] += 1
            size_of = expected.weight.shape[1], torch.float32
            weight = ops.fp4_dequantise(ours.tiles, ours.factors, *size_of)
            assert torch.equal(weight, expected.weight)
    assert found == num_tiled


@pytest.mark.parametrize("layout", FOUR_BITS)
@pytest.mark.usefixtures("tiled_on_cpu")
def test_tiles_of_experts_hold_what_the_numbers_mean(layout: str, make_pair: MakePair) -> None:
    """No tile is cut: of 96 units the first of two ranks has 64."""
    ranks = check_ranks(*make_pair("mixtral", layout), 2, torch.int32)
    assert [rank.sizes.width for rank in ranks] == [64, 32]


@pytest.mark.parametrize("layout", ["nvfp4", "ct mxfp4"])
@pytest.mark.usefixtures("tiled_on_cpu")
def test_ranks_hold_whole_experts_in_tiles(layout: str, make_pair: MakePair) -> None:
    quantised, plain = make_pair("mixtral", layout)
    whole = experts_of(plain, 0, 1)
    held: list[int] = []
    for rank in (0, 1):
        ours = experts_of(quantised, rank, 2, spreads_experts=True)
        for own, expert in enumerate(ours.sizes.held):
            held.append(expert)
            factor = None if ours.f2 is None else ours.f2[own]
            weight = untile_fp4(ours.w2[own], ours.sizes.hidden, ours.sizes.width, factor)
            assert torch.equal(weight, whole.w2[expert])
    assert held == [0, 1, 2, 3]


def experts_of(folder: Path, rank: int, size: int, *, spreads_experts: bool = False) -> Experts:
    model = model_of(folder, rank, size, spreads_experts=spreads_experts)
    return next(module for module in model.modules() if isinstance(module, Experts))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("wide", "nvfp4"),
        ("wide", "ct mxfp4"),
        ("llama", "nvfp4_awq"),
        ("mixtral", "ct nvfp4"),
        ("llama", "mixed"),
        ("llama", "modelopt mxfp8"),
    ],
)
@pytest.mark.usefixtures("tiled_on_cpu")
def test_logits_of_tiles_are_those_of_plain_weights(
    family: str, layout: str, make_pair: MakePair
) -> None:
    ours, expected = (
        make_paged_model(folder, ParallelGroup(0, 1)).prefill(prompts()[:3], 13)
        for folder in make_pair(family, layout)
    )
    torch.testing.assert_close(torch.cat(ours), torch.cat(expected), rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("tiled_on_cpu")
def test_scales_that_tiles_cannot_keep_are_refused_by_name(make_pair: MakePair) -> None:
    folder, _ = make_pair("llama", "nvfp4")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.self_attn.o_proj.weight_scale"].view(torch.uint8)[3, 1] = 0x81
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ScaleError, match=r"layers\.1\.self_attn\.o_proj has scales of which a sc"):
        model_of(folder, 0, 1)


def test_layers_of_several_algorithms() -> None:
    found = read(mixed(3))
    names = [f"model.layers.2.self_attn.{name}_proj" for name in "qkv"]
    fp8, nvfp4 = Fp8Scheme(scales="tensor", activations="static"), Nvfp4Scheme(layout="modelopt")
    assert found.scheme_of(*names) == fp8
    assert found.scheme_of("model.layers.2.mlp.down_proj") == nvfp4
    assert found.scheme_of("lm_head") is None is found.scheme_of("model.layers.0.mlp.gate")
    assert found.kv_cache == "fp8"
    assert len(found.rules) == 2, "names of other experts say the same"


def test_blocks_of_fp8_beside_nvfp4() -> None:
    """As RedHatAI publishes it: a format for each group of layers."""
    config = ct_floats("nvfp4-pack-quantized", fp_inputs(4, 16))
    config["format"] = "mixed-precision"
    blocks = ct_floats("mxfp8-quantized", None, strategy="block", group_size=None)
    group = blocks["config_groups"]["group_0"]
    group["weights"] |= {"block_structure": [128, 128], "scale_dtype": None}
    group |= {"format": "float-quantized", "targets": ["re:.*self_attn.*"]}
    config["config_groups"]["group_1"] = group
    found = read(config)
    blocked = found.scheme_of("model.layers.0.self_attn.o_proj")
    assert isinstance(blocked, Fp8Scheme) and blocked.block == (128, 128)
    nvfp4 = Nvfp4Scheme(layout="compressed-tensors")
    assert found.scheme_of("model.layers.0.mlp.down_proj") == nvfp4


def test_quarks_exceptions() -> None:
    fp8 = quark_numbers("fp8_e4m3", "per_tensor")
    found = read(quark(layer_quant_config={"*self_attn*": quark_layers(fp8, fp8)}))
    expected = Fp8Scheme(scales="tensor", activations="static")
    assert found.scheme_of("model.layers.0.self_attn.q_proj") == expected
    assert found.scheme_of("model.layers.0.mlp.up_proj") == Mxfp4Scheme("modelopt")
    assert found.scheme_of("model.layers.0.mlp.gate") is None
    assert found.kv_cache is None


def quark_with_cache(dtype: str = "fp8_e4m3", qscheme: str = "per_tensor") -> dict[str, Any]:
    """Returns what Quark writes of an FP8 KV cache beside MXFP4; queries may be in FP8, too."""
    cache = quark_layers(QUARK_MXFP4, None, quark_numbers(dtype, qscheme))
    layers = {"*k_proj": cache, "*v_proj": cache}
    return quark(
        export=quark_export(kv_cache_group=list(layers)),
        kv_cache_quant_config=layers,
        layer_quant_config=layers | {"*q_proj": cache},
        softmax_quant_spec=quark_numbers("fp8_e4m3", "per_tensor"),
    )


def test_quarks_kv_cache() -> None:
    found = read(quark_with_cache())
    assert found.kv_cache == "fp8"
    schemes = {found.scheme_of(f"model.layers.0.self_attn.{name}_proj") for name in "qkvo"}
    assert schemes == {Mxfp4Scheme("modelopt")}


def quark_of(**changes: Any) -> dict[str, Any]:
    config = quark()
    layers = config["global_quant_config"]
    return config | {"global_quant_config": layers | {"weight": layers["weight"] | changes}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (modelopt("NVFP4_SVD"), r"weights quantised by 'NVFP4_SVD'"),
        (modelopt("NVFP4", group_size=24), r"groups of 24"),
        (modelopt("MXFP8", group_size=16), r"groups of 16"),
        (modelopt("NVFP4", kv_cache_quant_algo="NVFP4"), r"a KV cache in 'NVFP4'"),
        (modelopt("MIXED_PRECISION"), r"quantized_layers: layers of several algorithms"),
        (
            modelopt("MIXED_PRECISION", quantized_layers={"model.layers.0": {"quant_algo": "X"}}),
            r"quantized_layers\.model\.layers\.0\.quant_algo: weights quantised by 'X'",
        ),
        (ct_floats("nvfp4-pack-quantized", group_size=32), r"scales per 'tensor_group' of 32"),
        (ct_floats("mxfp4-pack-quantized", num_bits=8), r"floats of 8 bits with scales"),
        (ct_floats("float-quantized", num_bits=4), r"floats of 4 bits stored as"),
        (
            ct_floats("float-quantized", fp_inputs(4, 16), num_bits=8, strategy="channel"),
            r"weights of 8 bits beside inputs of 4 bits",
        ),
        (quark_of(group_size=128), r"weight\.group_size: groups of 128"),
        (quark_of(dtype="fp6_e3m2"), r"weights in 'fp6_e3m2' with scales 'per_group'"),
        (quark(export={"weight_format": "fake_quantized"}), r"weight_format.*fake_quantized"),
        (quark_of(scale_format="e5m3", group_size=16), r"weight\.scale_format.*e5m3"),
        (quark_of(block_size=[128, 128]), r"weight\.block_size"),
        (quark_with_cache("int8"), r"kv_cache_quant_config\.\*k_proj\.output_tensors\.dtype"),
        (quark_with_cache(qscheme="per_channel"), r"output_tensors\.qscheme"),
        (quark(kv_cache_post_rope=True), r"kv_cache_post_rope"),
        (
            quark(global_quant_config=quark_layers(QUARK_MXFP4, None, QUARK_MXFP4)),
            r"global_quant_config\.output_tensors",
        ),
        (quark(global_quant_config=quark_layers(QUARK_NVFP4 * 2)), r"quantised in 4 steps"),
        (quark(global_quant_config=quark_layers(QUARK_NVFP4[::-1])), r"weight\.dtype"),
        (quark(global_quant_config=None), r"no quantised layers"),
    ],
)
def test_what_is_not_here_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedField, match=words):
        read(config)
