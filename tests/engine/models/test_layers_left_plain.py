"""Tests which layers of AWQ checkpoints are plain: those that the writers of such checkpoints, and
transformers, take for it; and that families list them by names of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers.quantizers.quantizers_utils import should_convert_module

from engine.models.quantization.reader import read_quantization
from engine.quantization import Quantization
from tests.engine.models.fp4_checkpoints import modelopt
from tests.engine.models.int4_checkpoints import awq, write_awq
from tests.engine.models.loaded_parameters import parameters
from tests.engine.models.quantised_checkpoints import quantise_checkpoint, write_fp8_tensors

_GEMMS = [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.kv_a_proj_with_mqa",),
    ("self_attn.o_proj",),
    ("linear_attn.out_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
    ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj", "mlp.experts.1.down_proj"),
]
"""Each row is computed together, inside of a layer."""


def read(listed: list[str]) -> Quantization:
    quantization = read_quantization(Path(), awq(128) | {"modules_to_not_convert": listed})
    assert quantization is not None
    return quantization


def are_plain(listed: list[str], layer: int, names: Sequence[str]) -> bool:
    """Returns whether AutoAWQ, which knows names inside of a layer, or transformers leaves all of
    these plain."""
    full = [f"model.layers.{layer}.{name}" for name in names]
    return all(any(part in name for part in listed) for name in names) or all(
        not should_convert_module(name, listed) for name in full
    )


@pytest.mark.parametrize(
    "listed",
    [
        ["self_attn.kv_a_proj_with_mqa"],
        ["kv_a_proj"],
        ["attn"],
        ["gate"],
        ["shared_expert"],
        ["_expert.", "mqa"],
        ["proj"],
        ["model.layers.1"],
        ["model.layers.1.mlp.gate"],
        [r"model\.layers\.\d+\.mlp"],
        [r".*mlp\.shared_expert.*", "o_proj"],
        ["model.layers.*.self_attn"],
        ["(self|linear)_attn"],
        ["visual", "lm_head"],
        ["mlp.experts", "down_proj"],
    ],
    ids=" ".join,
)
def test_layers_are_plain_where_their_writers_left_them_so(listed: list[str]) -> None:
    quantization = read(listed)
    for layer in (0, 1, 10):
        for names in _GEMMS:
            full = [f"model.layers.{layer}.{name}" for name in names]
            is_plain = quantization.scheme_of(*full) is None
            assert is_plain == are_plain(listed, layer, names), full


def test_numbers_are_whole() -> None:
    """QuantTrio names layers so; for transformers, whose dot is any character, that is 10, too."""
    quantization = read(["model.layers.1.", "layers.2"])
    plain = [i for i in range(30) if not quantization.scheme_of(f"model.layers.{i}.mlp.down_proj")]
    assert plain == [1, 2]


def test_a_part_of_a_name_does_not_split_what_is_computed_together() -> None:
    """A router's name is a part of those of experts, which are quantised."""
    quantization = read(["gate"])
    experts = [f"model.layers.0.mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")]
    assert quantization.scheme_of(*experts) is not None
    assert quantization.scheme_of("model.layers.0.mlp.gate") is None


def test_what_is_left_plain_by_parts_of_names_is_loaded(checkpoints: Path, tmp_path: Path) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    config = awq(32) | {"modules_to_not_convert": ["lf_att", "model.layers.2.", "down"]}
    left = ("self_attn", "layers.2.", "down_proj")
    quantise_checkpoint(checkpoints / "llama", quantised, plain, write_awq(32), config, left)
    ours, expected = (parameters(folder, 0, 1) for folder in (quantised, plain))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("family", "listed", "left"),
    [
        (
            "nemotron_h",
            [
                "backbone.layers.0.mixer.in_proj",
                "backbone.layers.2.mixer*",
                "*gate",
                "*latent_proj",
            ],
            ("layers.0.mixer.in_proj", "layers.2.mixer", "gate.", "latent"),
        ),
        (
            "lfm2",
            ["model.layers.1.feed_forward.w2", "re:.*out_proj"],
            ("layers.1.feed_forward.w2", "out_proj"),
        ),
    ],
)
def test_layers_are_listed_by_the_checkpoint_s_own_names(
    family: str, listed: list[str], left: tuple[str, ...], checkpoints: Path, tmp_path: Path
) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    config = modelopt("FP8", exclude_modules=[*listed, "lm_head"])
    quantise_checkpoint(checkpoints / family, quantised, plain, write_fp8_tensors, config, left)
    ours, expected = (parameters(folder, 0, 1) for folder in (quantised, plain))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor)
