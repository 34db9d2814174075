"""Checkpoints in every published layout of quantised weights are served as the plain weights that
they mean, on any rank; what they ask for beyond is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AwqConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config
from transformers.utils.quantization_config import QuantizationMethod

from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.quantization.reader import READERS, read_quantization
from engine.models.specs.base import UnsupportedField
from engine.parallel.distributed import ParallelGroup
from engine.quantization import Fp8Scheme
from tests.engine.models.loaded_parameters import check_same, parameters
from tests.engine.models.parity_cases import prompts
from tests.engine.models.quantised_checkpoints import (
    FP8_BLOCKS,
    FP8_TENSORS,
    MODELOPT,
    Writer,
    compressed_tensors,
    quantise_checkpoint,
    write_fp8_as_transformers,
    write_fp8_blocks,
    write_fp8_channels,
    write_fp8_tensors,
)
from tests.engine.models.rank_process import make_paged_model

_CHANNELS = compressed_tensors({"strategy": "channel"})
LAYOUTS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "blocks": (write_fp8_blocks((128, 128)), FP8_BLOCKS),
    "small blocks": (write_fp8_blocks((32, 16)), FP8_BLOCKS | {"weight_block_size": [32, 16]}),
    "ct blocks": (
        write_fp8_blocks((32, 32), "weight_scale"),
        compressed_tensors({"strategy": "block", "block_structure": [32, 32]}),
    ),
    "channels": (write_fp8_channels, _CHANNELS),
    "tensors": (write_fp8_tensors, FP8_TENSORS),
    "modelopt": (write_fp8_tensors, MODELOPT),
    "transformers": (
        write_fp8_as_transformers,
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
            "dequantize": False,
        },
    ),
}
FAMILIES = ["llama", "phi3", "mixtral", "deepseek_v3_yarn"]

Pair = tuple[Path, Path]
MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(checkpoints: Path, tmp_path: Path) -> MakePair:
    """Writes a family quantised, and plain with the same meaning."""

    def make(family: str, layout: str, **changes: Any) -> Pair:
        writer, config = LAYOUTS[layout]
        quantised, plain = tmp_path / "quantised", tmp_path / "plain"
        quantise_checkpoint(checkpoints / family, quantised, plain, writer, config | changes)
        return quantised, plain

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_loads_what_the_numbers_mean(
    family: str, layout: str, make_pair: MakePair
) -> None:
    """Ranks cut inside of blocks, too."""
    quantised, plain = make_pair(family, layout)
    check_same(quantised, plain)


def test_logits_are_those_of_the_plain_weights(make_pair: MakePair) -> None:
    quantised, plain = make_pair("llama", "blocks")
    ours, expected = (
        make_paged_model(folder, ParallelGroup(0, 1)).prefill(prompts()[:2], 13)
        for folder in (quantised, plain)
    )
    for first, second in zip(ours, expected, strict=True):
        assert torch.equal(first, second)


def test_layers_that_are_not_converted_stay_plain(checkpoints: Path, tmp_path: Path) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    listed = ["lm_head", "model.layers.1.self_attn.qkv_proj", "layers.2.mlp"]
    left = ("layers.1.self_attn.q", "layers.1.self_attn.k", "layers.1.self_attn.v", "layers.2.mlp")
    config = FP8_BLOCKS | {"modules_to_not_convert": listed}
    quantise_checkpoint(
        checkpoints / "llama", quantised, plain, write_fp8_blocks((128, 128)), config, left
    )
    ours, expected = (parameters(folder, 0, 1) for folder in (quantised, plain))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_groups_of_layers_have_schemes_of_their_own(checkpoints: Path, tmp_path: Path) -> None:
    def write(layer: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if ".mlp." in layer:
            return write_fp8_blocks((16, 16), "weight_scale")(layer, weight)
        return write_fp8_channels(layer, weight)

    blocks = compressed_tensors({"strategy": "block", "block_structure": [16, 16]})
    groups = {
        "mlp": blocks["config_groups"]["group_0"] | {"targets": [r"re:.*\.mlp\..*"]},
        "rest": _CHANNELS["config_groups"]["group_0"],
    }
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    config = _CHANNELS | {"config_groups": groups}
    quantise_checkpoint(checkpoints / "llama", quantised, plain, write, config)
    ours, expected = (parameters(folder, 1, 2) for folder in (quantised, plain))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("named", [r"re:.*\.down_proj$", "model.layers.0.mlp.down_proj"])
def test_a_layers_name_counts_more_than_its_class(named: str) -> None:
    """As compressed-tensors has it, in whatever order groups are."""
    blocks = compressed_tensors({"strategy": "block", "block_structure": [16, 16]})
    groups = {
        "a": _CHANNELS["config_groups"]["group_0"],
        "b": blocks["config_groups"]["group_0"] | {"targets": [named]},
    }
    quantization = read_quantization(Path(), _CHANNELS | {"config_groups": groups})
    assert quantization is not None
    for layer, scales in (("down_proj", "block"), ("up_proj", "channel")):
        scheme = quantization.scheme_of(f"model.layers.0.mlp.{layer}")
        assert isinstance(scheme, Fp8Scheme) and scheme.scales == scales


@pytest.mark.parametrize("kind", [FineGrainedFP8Config, AwqConfig, GPTQConfig, Mxfp4Config])
def test_what_transformers_writes_is_read(kind: Callable[..., Any]) -> None:
    written = (kind(bits=4) if kind is GPTQConfig else kind()).to_dict()
    quantization = read_quantization(Path(), json.loads(json.dumps(written)))
    assert quantization is not None
    assert quantization.method == written["quant_method"].value


def test_types_of_scales_and_of_absent_zero_points_say_nothing() -> None:
    types = {"scale_dtype": "torch.bfloat16", "zp_dtype": "torch.float8_e4m3fn"}
    config = compressed_tensors({"strategy": "channel", **types})
    config["config_groups"]["group_0"]["input_activations"] |= {**types, "strategy": "tensor"}
    config |= {"provider": "auto-round", "moe_sparsity_config": None}  # AutoRound 0.16.1
    found = read_quantization(Path(), config)
    assert found == read_quantization(Path(), _CHANNELS)


def test_the_early_name_of_compressed_tensors(make_pair: MakePair) -> None:
    quantised, _ = make_pair("llama", "channels")
    before = load_model_config(quantised).quantization
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    early = config.pop("quantization_config")
    path.write_text(json.dumps(config | {"compression_config": early}))
    assert load_model_config(quantised).quantization == before is not None
    path.write_text(json.dumps(config | {"compression_config": early | {"format": "dense"}}))
    with pytest.raises(CheckpointError, match=r"'dense' \(compression_config\.format"):
        load_model_config(quantised)


def test_the_nested_form_of_early_llm_compressor(tmp_path: Path) -> None:
    said = compressed_tensors({"strategy": "channel"})
    outer = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "dense"}}
    nested = outer | {"quantization_config": said}
    assert read_quantization(tmp_path, nested) == read_quantization(tmp_path, said)
    with pytest.raises(UnsupportedField) as caught:
        read_quantization(tmp_path, nested | {"quantization_config": said | {"bits": 4}})
    assert caught.value.field == "quantization_config.quantization_config.bits"


def test_modelopts_own_file(make_pair: MakePair) -> None:
    quantised, _ = make_pair("llama", "modelopt")
    before = load_model_config(quantised).quantization
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (quantised / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    after = load_model_config(quantised).quantization
    assert before is not None and after is not None
    assert after.rules == before.rules
    assert (before.kv_cache, after.kv_cache) == (None, "fp8")


def test_modelopts_own_file_names_modules_of_the_whole_model(tmp_path: Path) -> None:
    excluded = ["model.language_model.layers.0*", "language_model.model.layers.1.mlp", "visual*"]
    own = {"quant_algo": "FP8", "exclude_modules": excluded}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    quantization = read_quantization(tmp_path, None)
    assert quantization is not None
    found = [quantization.scheme_of(f"model.layers.{i}.mlp.up_proj") for i in range(3)]
    assert [scheme is not None for scheme in found] == [False, False, True]


def test_a_static_kv_cache_is_a_recommendation(make_pair: MakePair) -> None:
    folder, _ = make_pair("llama", "tensors", kv_cache_scheme="static")
    quantization = load_model_config(folder).quantization
    assert quantization is not None and quantization.kv_cache == "fp8"


def test_quantised_and_plain_weights_are_different_models(make_pair: MakePair) -> None:
    quantised, plain = make_pair("llama", "channels")
    assert load_model_config(quantised).model_hash != load_model_config(plain).model_hash


def refusal(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, ("'bitsandbytes'", "quant_method")),
        ({}, ("quant_method",)),
        (FP8_BLOCKS | {"fmt": "e5m2"}, ("'e5m2'", "quantization_config.fmt")),
        (FP8_BLOCKS | {"activation_scheme": "static"}, ("activation_scheme",)),
        (FP8_BLOCKS | {"weight_block_size": [128]}, ("weight_block_size",)),
        (FP8_BLOCKS | {"rotation": "hadamard"}, ("'hadamard'", "quantization_config.rotation")),
        (FP8_BLOCKS | {"modules_to_not_convert": ["re:("]}, ("modules_to_not_convert",)),
        (FP8_BLOCKS | {"modules_to_not_convert": "lm_head"}, ("modules_to_not_convert",)),
        (FP8_BLOCKS | {"expert_dtype": "fp3"}, ("'fp3'", "quantization_config.expert_dtype")),
        (MODELOPT | {"quant_algo": "NVFP4_SVD"}, ("'NVFP4_SVD'", "quant_algo")),
        (
            MODELOPT | {"kv_cache_scheme": {"num_bits": 4, "type": "float", "dynamic": False}},
            ("4 bits", "kv_cache_scheme.num_bits"),
        ),
        (compressed_tensors({"strategy": "channel", "num_bits": 6}), ("6 bits", "num_bits")),
        (compressed_tensors({"strategy": "attn_head"}), ("attn_head", "weights.strategy")),
        (compressed_tensors({"strategy": "channel"}, format="marlin-24"), ("format",)),
        (
            compressed_tensors({"strategy": "channel"}, transform_config={"R1": {"type": "h"}}),
            ("transform_config",),
        ),
        ({"quant_method": "awq", "bits": 8}, ("quantization_config.bits", "8")),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ("'marlin'",)),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[-1],
)
def test_what_is_not_here_is_refused_by_name(
    config: dict[str, Any], words: tuple[str, ...], make_pair: MakePair
) -> None:
    folder, _ = make_pair("llama", "tensors")
    message = refusal(folder, config)
    for word in words:
        assert word in message


def test_all_that_transformers_knows_is_read_or_refused_by_name(tmp_path: Path) -> None:
    for method in {kind.value for kind in QuantizationMethod} - READERS.keys():
        with pytest.raises(UnsupportedField, match=f"'{method}'"):
            read_quantization(tmp_path, {"quant_method": method})


def load_error(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        parameters(folder, 0, 1)
    return str(caught.value)


def test_files_that_are_not_as_config_says(make_pair: MakePair) -> None:
    folder, _ = make_pair("llama", "blocks")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(stored | {name: stored[name].to(torch.bfloat16)}, folder / "model.safetensors")
    assert f"has {name} in BF16; its type must be F8_E4M3" in load_error(folder)
    missing = name.replace("weight", "weight_scale_inv")
    left = {key: tensor for key, tensor in stored.items() if key != missing}
    save_file(left, folder / "model.safetensors")
    assert f"lacks {missing}" in load_error(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "weight_scale_inv" in load_error(folder)
