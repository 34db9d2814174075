"""Tests that AutoRound's checkpoints are served as the weights that they mean: in its own form, and
symmetric ones in AWQ's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.config.wrappers import text_config
from engine.models.quantization.reader import read_quantization
from engine.models.specs.base import UnsupportedField
from engine.quantization import Int4Scheme, Mxfp4Scheme, Mxfp8Scheme, Quantization
from tests.engine.models.fp4_checkpoints import write_mxfp4, write_mxfp8, write_nvfp4
from tests.engine.models.int4_checkpoints import auto_round, awq, write_auto_round, write_awq
from tests.engine.models.loaded_parameters import parameters
from tests.engine.models.quantised_checkpoints import Stored, Writer, quantise_checkpoint

_FORMS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (write_auto_round(32, symmetric=True), auto_round(32)),
    "gptq asymmetric": (write_auto_round(32, symmetric=False), auto_round(32, sym=False)),
    "awq": (write_awq(32, symmetric=True), auto_round(32, "auto_awq")),
    "awq asymmetric": (write_awq(32), auto_round(32, "auto_awq", sym=False)),
    "own": (
        write_auto_round(32, symmetric=False, stored_less=0),
        auto_round(32, sym=False) | {"packing_format": "auto_round"},
    ),
    "early": (
        write_auto_round(32, symmetric=True),
        auto_round(32)
        | {
            "quant_method": "intel/auto-round",
            "packing_format": None,
            "backend": "auto_round:gptq:exllamav2",
        },
    ),
    "awq by name": (
        write_awq(32, symmetric=True),
        awq(32) | {"provider": "auto-round", "sym": True, "zero_point": False},
    ),
}


_SMALL = {
    "packing_format": "auto_round:llm_compressor",
    "data_type": "mx_fp",
    "act_bits": 4,
    "act_data_type": "mx_fp",
}
_FORMS |= {
    "nvfp4": (
        write_nvfp4("compressed-tensors"),
        auto_round(16, **_SMALL | {"data_type": "nv_fp"}),
    ),
    "mxfp4": (write_mxfp4("weight_packed"), auto_round(32, **_SMALL)),
    "mxfp8": (write_mxfp8(), auto_round(32, **_SMALL | {"bits": 8, "act_bits": 8})),
}


@pytest.mark.parametrize("form", _FORMS)
def test_every_rank_loads_what_the_numbers_mean(
    form: str, checkpoints: Path, tmp_path: Path
) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(checkpoints / "llama", quantised, plain, *_FORMS[form])
    for rank, size in ((0, 1), (1, 2)):
        ours, expected = (parameters(folder, rank, size) for folder in (quantised, plain))
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(ours[name], tensor), (name, rank, size)


def test_layers_that_are_named_differ(checkpoints: Path, tmp_path: Path) -> None:
    small, usual = write_auto_round(16, symmetric=False), write_auto_round(32, symmetric=True)

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        return (small if "layers.0.mlp" in layer else usual)(layer, weight)

    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    exceptions = {name: {"group_size": 16, "sym": False} for name in names} | {
        r".*layers\.1\.self_attn.*": {"bits": 16, "data_type": "float"},
        "model.layers.2.mlp.down_proj": {"bits": 16, "act_bits": 16},
        "lm_head": {"bits": 16},
    }
    left = ("layers.1.self_attn", "layers.2.mlp.down")
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    config = auto_round(32, extra_config=exceptions)
    quantise_checkpoint(checkpoints / "llama", quantised, plain, write, config, left)
    ours, expected = (parameters(folder, 0, 1) for folder in (quantised, plain))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_small_floats_of_different_kinds() -> None:
    exceptions = {
        "model.layers.0.mlp": {"bits": 8, "act_bits": 8, "data_type": "mx_fp", "group_size": 32},
        r".*layers\.1\.mlp\.gate.*": {"bits": 16, "act_bits": 16, "data_type": "float"},
    }
    found = read(auto_round(32, **_SMALL, extra_config=exceptions))
    assert found.scheme_of("model.layers.0.mlp.up_proj") == Mxfp8Scheme()
    expert = found.scheme_of("model.layers.1.mlp.experts.0.up_proj")
    assert expert == Mxfp4Scheme("compressed-tensors")
    assert found.scheme_of("model.layers.1.mlp.gate") is None


@pytest.mark.parametrize(
    "blocks",
    [
        "model.visual.blocks,model.language_model.layers",
        ["model.language_model.layers"],
        [["model.language_model.layers.0", "model.language_model.layers.1"]],
    ],
    ids=["text", "names", "blocks"],
)
def test_blocks_and_exceptions_are_of_the_whole_model(blocks: object) -> None:
    exceptions = {
        "model.language_model.layers.0.mlp.gate": {"bits": 16},
        r".*language_model\.layers\.1\.mlp.*": {"bits": 16},
    }
    config = auto_round(128, block_name_to_quantize=blocks, extra_config=exceptions)
    whole = {"text_config": {}, "quantization_config": config}
    found = read(text_config("Qwen3VLForConditionalGeneration", whole)["quantization_config"])
    assert isinstance(found.scheme_of("model.layers.0.mlp.up_proj"), Int4Scheme)
    for plain in ("layers.0.mlp.gate", "layers.1.mlp.up_proj", "mtp.layers.0.mlp.up_proj"):
        assert found.scheme_of(f"model.{plain}".replace("model.mtp", "mtp")) is None


def read(config: dict[str, Any]) -> Quantization:
    quantization = read_quantization(Path(), config)
    assert quantization is not None
    return quantization


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": 2}, "bits"),
        ({"data_type": "mx_fp"}, "data_type"),
        ({"act_bits": 8}, "act_bits"),
        ({"packing_format": "auto_round:llm_compressor"}, "data_type: .* of type 'int', 4 bits"),
        (_SMALL | {"group_size": 64}, "data_type: .* 'mx_fp', 4 bits in groups of 64"),
        (_SMALL | {"group_size": 32, "sym": False}, "sym"),
        (
            _SMALL | {"group_size": 32, "extra_config": {"model.layers.0": {"bits": 2}}},
            "extra_config.*data_type",
        ),
        ({"packing_format": "auto_round"}, "packing_format"),
        ({"packing_format": None}, "packing_format"),
        ({"rotation_config": {"hadamard": 1}}, "rotation_config"),
        ({"extra_config": {"lm_head": {"bits": 4}}}, "extra_config.lm_head"),
        ({"extra_config": {"model.layers.0.mlp": {"bits": 3}}}, "extra_config.*mlp.bits"),
        ({"extra_config": {"model.layers.0.mlp": {"super_bits": 6}}}, "extra_config.*super_bits"),
        ({"extra_config": {"(": {"bits": 16}}}, "extra_config"),
    ],
    ids=str,
)
def test_what_is_not_here_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedField, match=rf"quantization_config\.{named}"):
        read(auto_round(128) | change)
