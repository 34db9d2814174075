"""Projections of attention that are stored as some other number of ranks had them are those of a
checkpoint that has them apart, on any rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.quantization.reader import read_quantization
from engine.quantization import Fp8Scheme, Mxfp4Scheme
from tests.engine.models.loaded_parameters import check_same
from tests.engine.models.quantised_checkpoints import write_fp8_blocks
from tests.engine.models.reference_models import FAMILIES, save_checkpoint

NUM_RANKS = 2
"""The family has this many KV heads where layers see everything, and twice as many elsewhere."""
NAMES = ("q_proj", "k_proj", "v_proj")
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [16, 32], "modules_to_not_convert": ["mlp", "o_proj"],
}  # fmt: skip


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    save_checkpoint(FAMILIES["mimo_v2"], folder)
    return folder


def write_cut(apart: Path, folder: Path, plain: Path, *, is_quantised: bool) -> None:
    """Writes a checkpoint as MiMo-V2.5 is published, and to `plain` the same numbers apart."""
    for to in (folder, plain):
        to.mkdir()
        shutil.copy(apart / "config.json", to)
    tensors = load_file(apart / "model.safetensors")
    own: dict[str, Tensor] = {
        "visual.blocks.0.weight": torch.ones(2),
        "model.mtp.layers.0.weight": torch.ones(2),
    }
    meant: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, is_query, _ = name.partition(".q_proj")
        if is_query:
            projections = [tensors[f"{layer}.{one}.weight"] for one in NAMES]
            cut_layer(layer, projections, own, meant, is_quantised=is_quantised)
        elif not any(f".{one}." in name for one in NAMES):
            own[name] = meant[name] = tensor
    save_file(own, folder / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2"}
    if is_quantised:
        config["quantization_config"] = FP8
    (folder / "config.json").write_text(json.dumps(config))


def cut_layer(
    layer: str,
    projections: list[Tensor],
    own: dict[str, Tensor],
    meant: dict[str, Tensor],
    *,
    is_quantised: bool,
) -> None:
    stored: dict[str, list[Tensor]] = {}
    meanings: list[tuple[Tensor, ...]] = []
    for parts in zip(*(one.chunk(NUM_RANKS) for one in projections), strict=True):
        together = torch.cat(parts)
        written, meaning = {"x.weight": together}, together
        if is_quantised:
            written, meaning = write_fp8_blocks((16, 32))("x", together)
        for kind, tensor in written.items():
            stored.setdefault(kind.removeprefix("x"), []).append(tensor)
        meanings.append(meaning.split([len(part) for part in parts]))
    own |= {f"{layer}.qkv_proj{kind}": torch.cat(ranks) for kind, ranks in stored.items()}
    for name, ranks in zip(NAMES, zip(*meanings, strict=True), strict=True):
        meant[f"{layer}.{name}.weight"] = torch.cat(ranks)


@pytest.mark.parametrize("is_quantised", [False, True], ids=["plain", "fp8"])
def test_ranks_hold_what_they_hold_of_projections_apart(
    is_quantised: bool, apart: Path, tmp_path: Path
) -> None:
    """Keys and values share a block of scales, and no rank's rows fill whole blocks."""
    folder, plain = tmp_path / "cut", tmp_path / "plain"
    write_cut(apart, folder, plain, is_quantised=is_quantised)
    check_same(folder, plain)


@pytest.mark.parametrize("heads", [3, 7])
def test_heads_that_such_ranks_cannot_share_are_refused(
    heads: int, apart: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = json.loads((apart / "config.json").read_text())
    config |= {"architectures": ["MiMoV2ForCausalLM"], "swa_num_key_value_heads": heads}
    config |= {"swa_num_attention_heads": heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="projections cut for 2 ranks"):
        load_model_config(tmp_path, load_format="dummy")


def test_experts_may_be_stored_in_four_bits() -> None:
    """As MiMo-V2.6 is published."""
    published = {**FP8, "store_dtype": "mxfp4", "mxfp4_block_size": 32}
    published.pop("modules_to_not_convert")
    read = read_quantization(Path(), published)
    assert read is not None
    expert, dense = "model.layers.1.mlp.experts.3.up_proj", "model.layers.0.mlp.up_proj"
    assert read.scheme_of(expert) == Mxfp4Scheme("modelopt")
    assert isinstance(read.scheme_of(dense), Fp8Scheme)
