"""Tests that INT8 checkpoints of every layout, and int4 that is meant for inputs of 8 bits, are
served as the weights that they mean, on any rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.quantization.reader import read_quantization
from engine.models.specs.base import UnsupportedField
from engine.quantization import Fp8Scheme, Int4Scheme, Int8Scheme, Quantization
from tests.engine.models.int4_checkpoints import auto_round
from tests.engine.models.int8_checkpoints import (
    INT8_INPUTS,
    LAYOUTS,
    MakePair,
    ct_int,
    gptq_int8,
    quark_int8,
)
from tests.engine.models.loaded_parameters import check_same, parameters


def read(config: dict[str, Any]) -> Quantization:
    found = read_quantization(Path(), config)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_every_rank_loads_what_the_numbers_mean(
    family: str, layout: str, make_int8_pair: MakePair
) -> None:
    """Ranks cut inside of groups and words, too."""
    check_same(*make_int8_pair(family, layout))


@pytest.mark.parametrize("layout", ["w8a8", "w8a16 channels"])
def test_parts_that_the_checkpoint_has_as_one(layout: str, make_int8_pair: MakePair) -> None:
    check_same(*make_int8_pair("phi3", layout))


def test_sizes_that_four_does_not_divide(make_int8_pair: MakePair) -> None:
    check_same(*make_int8_pair("deepseek_v3_yarn", "w8a16 channels"))


def test_layers_of_4_and_of_8_bits() -> None:
    config = gptq_int8(128, dynamic={r"+:.*\.down_proj": {"bits": 4, "group_size": 32}})
    found = read(config)
    down, up = (found.scheme_of(f"model.layers.0.mlp.{name}_proj") for name in ("down", "up"))
    assert isinstance(down, Int4Scheme) and down.group_size == 32
    assert isinstance(up, Int8Scheme) and up.group_size == 128
    named = {"model.layers.0.mlp.down_proj": {"bits": 8}}
    found = read(auto_round(128, extra_config=named))
    assert isinstance(found.scheme_of("model.layers.0.mlp.down_proj"), Int8Scheme)


def test_inputs_that_stay_as_they_are_are_told_apart() -> None:
    schemes = {name: read(config).rules[0].scheme for name, (_, config) in LAYOUTS.items()}
    meant = {
        name: (scheme.activations, scheme.activation_numbers)
        for name, scheme in schemes.items()
        if isinstance(scheme, Int4Scheme | Int8Scheme) and scheme.activation_numbers
    }
    assert meant == {
        "w8a8": ("dynamic", "int8"),
        "w8a8 static": ("static", "int8"),
        "w8a8 tensors": ("dynamic", "int8"),
        "w8a8 asymmetric inputs": ("none", "int8"),
        "w4a8": ("dynamic", "int8"),
        "w4afp8": ("dynamic", "e4m3"),
        "quark w8a8": ("dynamic", "int8"),
        "quark w8a8 static tensors": ("static", "int8"),
        "modelopt sq": ("static", "int8"),
        "modelopt w4a8": ("static", "e4m3"),
    }


_BLOCKS = Fp8Scheme(scales="block", block=(128, 128), scale_name="weight_scale_inv")


@pytest.mark.parametrize(("layout", "is_said"), [("w4afp8", True), ("w8a8", False)])
def test_what_stays_as_it_is_is_said(
    layout: str, is_said: bool, make_int8_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = make_int8_pair("llama", layout)
    with caplog.at_level("INFO"):
        parameters(quantised, 0, 1)
    words = "inputs are meant to be quantised to e4m3"
    assert any(words in record.getMessage() for record in caplog.records) == is_said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"group_size": [128, 128]}, _BLOCKS),
        ({"group_size": [128, 128], "weight_block_size": [128, 128]}, _BLOCKS),
        (
            {"group_size": 0, "act_bits": None, "packing_format": None},
            Fp8Scheme(scales="tensor", activations="none"),
        ),
        ({"group_size": -1, "act_bits": 16}, Fp8Scheme(scales="channel", activations="none")),
        (
            {"group_size": 0, "packing_format": "auto_round:fp8_static", "act_dynamic": False,
             "activation_scheme": "static"},
            Fp8Scheme(scales="tensor", activations="static"),
        ),
    ],
    ids=["blocks", "auto-round 0.15", "weights alone", "channels", "static"],
)  # fmt: skip
def test_auto_rounds_own_form_of_fp8(changes: dict[str, Any], expected: Fp8Scheme) -> None:
    config = auto_round(
        128,
        "fp8",
        bits=8,
        data_type="fp",
        act_bits=8,
        act_data_type="fp",
        act_dynamic=True,
        act_group_size=128,
        act_sym=True,
        activation_scheme="dynamic",
        fmt="e4m3",
        static_kv_granularity="tensor",
    )
    assert read(config | changes).rules[0].scheme == expected


def test_modelopt_says_the_size_of_groups_beside_config_json(tmp_path: Path) -> None:
    """As ModelOpt 0.47 does of AWQ."""
    own = {"quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    found = read_quantization(tmp_path, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"})
    assert found is not None
    scheme = found.rules[0].scheme
    assert isinstance(scheme, Int4Scheme) and scheme.group_size == 64


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ct_int(num_bits=6), r"weights\.num_bits: weights of 6 bits"),
        (ct_int(strategy="attn_head"), r"8-bit weights with scales per 'attn_head'"),
        (
            ct_int(inputs=INT8_INPUTS | {"num_bits": 4}),
            r"input_activations\.num_bits: activations of 4 bits",
        ),
        (ct_int(inputs=INT8_INPUTS | {"type": "float"}), r"8-bit integers beside inputs in e4m3"),
        (ct_int(inputs=INT8_INPUTS, type="float", form="float-quantized"), r"FP8 weights beside"),
        (
            quark_int8(dtype="fp8_e4m3"),
            r"input_tensors\.dtype: INT8 weights beside inputs in",
        ),
        (quark_int8(qscheme="per_group"), r"weights in 'int8' with scales 'per_group'"),
        (gptq_int8(128) | {"bits": 3}, r"weights of 3 bits"),
        (auto_round(128, "auto_awq", bits=8), r"weights of 8 bits"),
        (auto_round(128, "fp8", bits=8, data_type="fp", fmt="e5m2"), r"numbers in 'e5m2'"),
    ],
)
def test_what_is_not_here_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedField, match=words):
        read(config)
