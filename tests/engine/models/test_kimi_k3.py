"""Kimi K3 as Moonshot publishes it: its config.json, its experts in MXFP4, and what no release of
it has. What it computes is compared with the other families'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.config import ParallelConfig
from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.draft_checkpoint import read_draft
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from engine.quantization import Mxfp4Scheme
from tests.engine.models.fp4_checkpoints import ct_floats, write_mxfp4
from tests.engine.models.loaded_parameters import check_same
from tests.engine.models.quantised_checkpoints import quantise_checkpoint

_FULL = [*range(4, 93, 4), 93]
_PLAIN = [
    "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*",
]  # fmt: skip
_MXFP4 = ct_floats("mxfp4-pack-quantized") | {"ignore": _PLAIN}
_TEXT = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "architectures": ["KimiLinearForCausalLM"],
    "attn_res_block_size": 12,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "kv_lora_rank": 512,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": _FULL,
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 94) if i not in _FULL],
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 1048576,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 3072,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 96,
    "num_expert_group": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_hidden_layers": 93,
    "num_key_value_heads": 96,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": _MXFP4,
    "rms_norm_eps": 1e-05,
    "routed_expert_hidden_size": 3584,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
PUBLISHED = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k3",
    "text_config": _TEXT,
    "tie_word_embeddings": False,
    "vision_config": {"mm_projector_type": "patchmergerv2", "vt_hidden_size": 1024},
}


def spec_in(folder: Path) -> DenseSpec:
    found = spec_of(load_model_config(folder))
    assert isinstance(found, DenseSpec)
    return found


def test_the_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    model = load_model_config(tmp_path, load_format="dummy")
    spec = spec_of(model)
    assert isinstance(spec, DenseSpec) and model.architecture == "KimiK3ForCausalLM"
    assert model.max_model_len == 1 << 20 and spec.block_layers == 12
    assert [len(group.layers) for group in model.kv_layers] == [24, 24, 24, 21]
    assert spec.experts is not None and spec.experts.dense_layers == (0,)
    assert (spec.experts.latent_size, spec.experts.shared_size) == (3584, 6144)
    spec.check_parallel(model, ParallelConfig(tensor_parallel_size=8))
    block, schemes = "model.layers.1.mlp", model.quantization
    assert schemes is not None
    assert schemes.scheme_of(f"{block}.experts.0.w1") == Mxfp4Scheme("compressed-tensors")
    # Its config.json leaves out what it does not quantise either.
    for name in ("routed_expert_down_proj", "routed_expert_up_proj", "shared_experts.up_proj"):
        assert schemes.scheme_of(f"{block}.{name}") is None


def test_experts_in_mxfp4_as_published(checkpoints: Path, tmp_path: Path) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    left = "self_attn.", "shared_experts.", ".mlp.", "routed_expert_", "_res_proj", "lm_head"
    quantise_checkpoint(
        checkpoints / "kimi_k3", quantised, plain, write_mxfp4("weight_packed"), _MXFP4, left
    )
    check_same(quantised, plain)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("attn_res_block_size", {"attn_res_block_size": None}),
        ("routed_expert_hidden_size", {"routed_expert_hidden_size": None}),
        ("activation_situ_linear_beta", {"activation_situ_linear_beta": None}),
        ("hidden_act", {"hidden_act": "silu"}),
        ("mla_use_output_gate", {"mla_use_output_gate": False}),
        ("use_full_rank_gate", {"use_full_rank_gate": False}),
        ("gate_lower_bound", {"gate_lower_bound": 0.5}),
        ("linear_attn_config", {"num_heads": 16}),
    ],
)
def test_what_no_release_has_is_refused(
    name: str, changes: dict[str, Any], checkpoints: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoints / "kimi_k3" / "config.json").read_text())
    inner = config["linear_attn_config"]
    for field, value in changes.items():
        (inner if field in (*inner, "use_full_rank_gate") else config)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"\({name}\)"):
        load_model_config(tmp_path, load_format="dummy")


def test_nodes_with_other_blocks_do_not_exchange_anything(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(checkpoints / "kimi_k3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_res_block_size": 3}))
    hashes = {load_model_config(one).model_hash for one in (folder, checkpoints / "kimi_k3")}
    assert len(hashes) == 2


def test_what_has_kimi_k3s_fields_is_not_read_as_kimi_linear(
    checkpoints: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoints / "kimi_linear" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_res_block_size": 6}))
    with pytest.raises(CheckpointError, match=r"\(attn_res_block_size\)"):
        load_model_config(tmp_path, load_format="dummy")


def test_drafters_that_read_streams_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    target = load_model_config(checkpoints / "kimi_k3")
    with pytest.raises(CheckpointError, match="several residual streams"):
        read_draft("eagle3", str(tmp_path), target, 3)
