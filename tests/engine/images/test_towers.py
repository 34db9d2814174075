"""Each tower makes of an image what transformers' makes of it, on grids of odd sizes, and reads
what is published: every tensor has one place, and fields that are not here leave the text part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.config import EngineConfig
from engine.explain.explanation import Explanation
from engine.explain.towers import explain_tower
from engine.images.image_config import ImageConfig
from engine.images.vision_spec import VisionSpec
from engine.models.checkpoint import load_model_config
from engine.models.errors import CheckpointError
from engine.models.factory import create_tower
from engine.models.loader import load_weights
from engine.models.vision.tower import VisionTower
from engine.node.settings.image_settings import ImageSettings
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from tests.engine.images.test_vision_parity import config_of
from tests.engine.images.vision_checkpoints import Picture, loaded, picture, save_checkpoint
from tests.engine.images.vision_families import FAMILIES
from tests.engine.models.rank_process import make_paged_model

GRIDS = [(2, 1), (1, 11), (5, 3), (9, 6)]


def tower_of(config: EngineConfig) -> VisionTower:
    tower = create_tower(config, ParallelPlace(range(3)), "cpu")
    assert tower is not None
    load_weights(tower, config, lambda fraction: None, is_tower=True)
    return tower


@torch.no_grad()
def features(folder: Path, kind: str, one: Picture) -> list[torch.Tensor]:
    """Returns what transformers has of an image: its embeddings, then what is added behind layers
    of the text part."""
    inputs = FAMILIES[kind].model_inputs([one.frame])
    found = loaded(folder, kind).model.get_image_features(**inputs, return_dict=True)
    tapped = getattr(found, "deepstack_features", None) or []
    return [torch.cat(tuple(part)) for part in (found.pooler_output, *tapped)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_towers_compute_what_those_of_transformers_do(kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(kind, tmp_path)
    tower = tower_of(config_of(folder))
    for seed, (rows, columns) in enumerate(FAMILIES[kind].grids or GRIDS):
        one = picture(kind, rows, columns, seed)
        expected = features(folder, kind, one)
        found = tower.encode(one.pixels)
        assert found.shape[:2] == (len(expected), rows * columns)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs.view_as(ours), rtol=1e-4, atol=1e-4)
    # What `tandem explain` says of an image is what encoding it computes.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        tower.encode(tower.spec.blank_image(min(64, tower.spec.pixels.max_tokens)))
    told = explain_tower(config_of(folder), 64)
    assert counted.get_total_flops() == explained_flops(told)
    parts = 2 + tower.spec.depth + len(tower.spec.tapped_layers)  # with patches, and the merger
    assert sum(len(layers) for layers, _ in told.choices) == parts


def explained_flops(told: Explanation) -> int:
    """Returns what the products take that a tower is said to compute, by their sizes."""
    total = 0
    for layers, rows in told.choices:
        for row in rows:
            a, b, c, *width = map(int, re.findall(r"\d+", row.tile))
            total += len(layers) * (4 * a * b**2 * c * width[0] if width else 2 * a * b * c)
    return total


def changed(folder: Path, target: Path, **vision: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= vision
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("qwen2_5", "hidden_act", "relu"),
        ("qwen3", "num_position_embeddings", 24),
        ("qwen3_5_moe", "out_hidden_size", 32),
        ("pixtral", "hidden_act", "relu"),
        ("pixtral", "head_dim", 32),
        ("glm4v", "num_heads", 3),
        ("kimi", "merge_kernel_size", [1, 2]),
        ("kimi", "pos_emb_width", 6),
        ("gemma3", "image_size", 169),
        ("minimax_m3", "hidden_act", "silu"),
        ("gemma4", "head_dim", 8),
        ("gemma4", "num_key_value_heads", 1),
        ("gemma4_patches", "output_proj_dims", 16),
        ("gemma4_patches", "pooling_kernel_size", 0),
        ("muse", "pos_emb_width", 6),
        ("muse", "pos_emb_height", 5),
        ("muse", "hidden_act", "silu"),
        ("gemma3", "num_attention_heads", 0),
        ("gemma3", "patch_size", 0),
        ("pixtral", "patch_size", 0),
        ("glm4v", "patch_size", 0),
        ("kimi", "patch_size", 0),
        ("qwen3", "patch_size", 0),
    ],
)
def test_of_towers_of_another_kind_the_text_part_is_served(
    kind: str, field: str, value: object, tmp_path: Path
) -> None:
    family = FAMILIES[kind]
    config = family.make_config()
    config.architectures = [family.model.__name__]
    config.save_pretrained(tmp_path)
    changed(tmp_path, tmp_path, **{field: value})
    model = load_model_config(tmp_path, load_format="dummy")
    with pytest.raises(CheckpointError, match=rf"vision_config.{field}.*--max-images 0"):
        ImageSettings().image_config(model, None)
    assert model.vision is None
    assert ImageSettings(max_images=0).image_config(model, None) == ImageConfig()


def test_sizes_that_minimax_lists_are_the_familys(tmp_path: Path) -> None:
    """Its preprocessor_config.json has [672, 672] where others have names, and nothing reads it."""
    family = FAMILIES["minimax_m3"]
    config = family.make_config()
    config.architectures = [family.model.__name__]
    config.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": [672, 672]}))
    vision = load_model_config(tmp_path, load_format="dummy").vision
    assert vision is not None and vision.pixels.max_tokens == 576


KIMI_PUBLISHED = {
    "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed", "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "merge_kernel_size": [2, 2],
    "video_attn_type": "spatial_temporal", "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger", "mm_hidden_size": 1152, "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5, "text_hidden_size": 7168,
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_towers_travel_to_other_processes(kind: str, tmp_path: Path) -> None:
    family = FAMILIES[kind]
    config = family.make_config()
    config.architectures = [family.model.__name__]
    config.save_pretrained(tmp_path)
    vision = load_model_config(tmp_path, load_format="dummy").vision
    assert vision is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(vision), type=VisionSpec) == vision


def test_kimi_as_it_is_published(tmp_path: Path) -> None:
    """Its fields have other names than in transformers, and its processor a form of its own."""
    config = FAMILIES["kimi"].make_config().to_dict()
    config |= {"architectures": ["KimiK25ForConditionalGeneration"]}
    config |= {"vision_config": KIMI_PUBLISHED, "media_placeholder_token_id": 77}
    (tmp_path / "config.json").write_text(json.dumps(config))
    media = {"in_patch_limit": 65_536, "patch_limit_on_one_side": 512, "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    vision = load_model_config(tmp_path, load_format="dummy").vision
    assert vision is not None and vision.image_token_id == 77
    assert (vision.depth, vision.hidden_size, vision.num_heads) == (27, 1152, 16)
    assert (vision.pixels.max_patches, vision.pixels.longest_edge) == (65_536, 7168)
    assert vision.pixels.mean == (0.5, 0.5, 0.5)


def test_kimi_as_transformers_writes_it(tmp_path: Path) -> None:
    """It calls layers of the text part blocks, and has some parts of the tower elsewhere."""
    published, saved = tmp_path / "published", tmp_path / "saved"
    folders = [save_checkpoint("kimi", published), save_checkpoint("kimi", saved, renames=False)]
    one, prompt = picture("kimi", 3, 2, 1), [5, 7, 9, 11]
    towers = [tower_of(config_of(folder)).encode(one.pixels) for folder in folders]
    assert torch.equal(*towers)
    group = ParallelGroup(0, 1)
    logits = [make_paged_model(folder, group).prefill([prompt], 1000)[0] for folder in folders]
    assert torch.equal(*logits)


def test_processors_as_transformers_5_writes_them(tmp_path: Path) -> None:
    config = FAMILIES["pixtral"].make_config()
    config.architectures = ["Mistral3ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    processor = {"image_processor": {"size": {"longest_edge": 1400}, "image_mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    vision = load_model_config(tmp_path, load_format="dummy").vision
    assert vision is not None and vision.pixels.longest_edge == 1400
    assert vision.pixels.mean == (0.1, 0.2, 0.3) and vision.row_end_ids == (12, 13)
