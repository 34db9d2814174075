"""Experts in one tensor a layer, in whatever form tools write them, are those of the published
checkpoint, on any rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import CheckpointError
from tests.engine.models.loaded_parameters import check_same, parameters
from tests.engine.models.quantised_checkpoints import (
    FP8_BLOCKS,
    FP8_TENSORS,
    quantise_checkpoint,
    write_fp8_as_transformers,
    write_fp8_blocks,
)
from tests.engine.models.reference_models import FAMILIES, reference

WITH_EXPERTS = [
    "mixtral", "qwen2_moe", "qwen3_moe_sharded", "glm4_moe", "glm4_moe_lite", "minimax_m2",
    "deepseek_v2", "deepseek_v3_yarn", "qwen3_next",
]  # fmt: skip


def save_stacked(folder: Path, to: Path) -> None:
    """Saves a checkpoint as transformers 5 has it in memory."""
    reference(folder).save_pretrained(to, save_original_format=False)


def turn(folder: Path) -> None:
    """Turns stacked experts as Qwen3-VL with experts is published."""
    path = folder / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_stacked_experts_are_read(
    family: str, is_turned: bool, checkpoints: Path, tmp_path: Path
) -> None:
    save_stacked(checkpoints / family, tmp_path)
    stacks = [name for name in load_file(tmp_path / "model.safetensors") if "gate_up" in name]
    assert stacks and all(name.endswith("experts.gate_up_proj") for name in stacks)
    if is_turned:
        turn(tmp_path)
    check_same(tmp_path, checkpoints / family)


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_single_experts_may_have_the_names_of_memory(
    family: str, checkpoints: Path, tmp_path: Path
) -> None:
    """Quark takes the experts of transformers 5 apart, and saves them so."""
    shutil.copytree(checkpoints / family, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        for published, in_memory in (
            ("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")
        ):  # fmt: skip
            name = name.replace(f".{published}.", f".{in_memory}.")
        tensors[name] = tensor
    assert any(".mlp.experts.0.up_proj." in name for name in tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    check_same(tmp_path, checkpoints / family)


@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("hidden", "units"), [(32, 16), (32, 32), (16, 32)])
def test_sizes_that_make_one_of_the_tensors_square(
    hidden: int, units: int, is_turned: bool, tmp_path: Path
) -> None:
    family = FAMILIES["qwen3_moe_sharded"]
    config = family.make_config()
    config.hidden_size, config.moe_intermediate_size = hidden, units
    model = family.model(config)
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    if is_turned:
        turn(tmp_path / "stacked")
    check_same(tmp_path / "stacked", tmp_path / "published")


def test_stacked_experts_of_another_size_are_named(checkpoints: Path, tmp_path: Path) -> None:
    save_stacked(checkpoints / "qwen3_next", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"moe_intermediate_size": 8}))
    with pytest.raises(CheckpointError, match="lacks model.layers.0.mlp.experts.0.down_proj"):
        parameters(tmp_path, 0, 1)


def test_a_turned_part_is_a_view_of_its_expert(checkpoints: Path, tmp_path: Path) -> None:
    """Each expert is told from the others, and gate from up."""
    save_stacked(checkpoints / "qwen3_moe_sharded", tmp_path)
    turn(tmp_path)
    loaded = parameters(tmp_path, 0, 1)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    [w13] = (loaded[name] for name in loaded if name.endswith("layers.1.mlp.experts.w13"))
    assert torch.equal(w13[5], stored[5].t())


@pytest.mark.parametrize("is_blocks", [True, False], ids=["blocks", "tensors"])
def test_stacked_experts_in_fp8_have_their_scales(
    is_blocks: bool, checkpoints: Path, tmp_path: Path
) -> None:
    """Mistral Small 4 has static scales of whole tensors, so written by transformers 5."""
    apart, stacked = tmp_path / "apart", tmp_path / "stacked"
    writer = write_fp8_blocks((8, 16)) if is_blocks else write_fp8_as_transformers
    config = FP8_BLOCKS | {"weight_block_size": [8, 16]} if is_blocks else FP8_TENSORS
    leave = ("mlp.gate.",)
    folder = checkpoints / "glm4_moe"
    quantise_checkpoint(folder, apart, tmp_path / "plain", writer, config, leave)
    shutil.copytree(apart, stacked)
    path = stacked / "model.safetensors"
    save_file(stacked_scales(load_file(path)), path, metadata={"format": "pt"})
    check_same(stacked, apart)


def stacked_scales(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns experts in FP8 as transformers has them in memory."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    blocks = {name.partition("0.gate_proj")[0] for name in tensors if ".experts.0.gate" in name}
    kinds = {
        "weight": "",
        "weight_scale_inv": "_scale_inv",
        "activation_scale": "_activation_scale",
    }
    for block in blocks:
        count = len({name for name in tensors if name.startswith(block)} - found.keys())
        count = sum(f"{block}{i}.gate_proj.weight" in tensors for i in range(count))
        for kind, ending in kinds.items():
            if f"{block}0.down_proj.{kind}" not in tensors:
                continue
            gate, up, down = (
                torch.stack([tensors[f"{block}{i}.{name}_proj.{kind}"] for i in range(count)])
                for name in ("gate", "up", "down")
            )
            is_scalar = gate.dim() == 1
            if is_scalar and kind == "weight_scale_inv":
                gate, up, down = (scale.view(-1, 1, 1) for scale in (gate, up, down))
            both = gate if is_scalar and kind == "activation_scale" else torch.cat((gate, up), 1)
            found[f"{block}gate_up_proj{ending}"] = both
            found[f"{block}down_proj{ending}"] = down
    return found
