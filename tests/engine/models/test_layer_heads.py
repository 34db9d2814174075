"""Reads heads that differ by layer from config.json as publishers write it, and counts the bytes
that are kept of a token."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from engine.head_sizes import HeadSizes
from engine.models.checkpoint import CheckpointError, check_parallel, load_model_config
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from kv_transfer.errors import HandshakeMismatch

FULL, WINDOW = "full_attention", "sliding_attention"
MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash",
    "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "max_position_embeddings": 262144, "layernorm_epsilon": 1e-5, "rope_theta": 5000000,
    "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "attention_value_scale": 0.707,
    "sliding_window": 128, "sliding_window_size": 128, "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False, "attention_bias": False,
    "hybrid_layer_pattern": [0, *([1, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] * 7)],
    "moe_layer_freq": [0] + [1] * 47, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": None, "norm_topk_prob": True, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": None, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}  # fmt: skip


LAGUNA = {
    "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "vocab_size": 100352,
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "attention_bias": False, "rms_norm_eps": 1e-6,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "gating": True, "sliding_window": 512,
    "rope_parameters": {
        FULL: {
            "rope_theta": 500000.0, "rope_type": "yarn", "factor": 64.0,
            "original_max_position_embeddings": 4096, "beta_slow": 1.0, "beta_fast": 64.0,
            "attention_factor": 1.4158883083359672, "partial_rotary_factor": 0.5,
        },
        WINDOW: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        "original_max_position_embeddings": 4096,
    },
    "layer_types": [FULL, WINDOW, WINDOW, WINDOW] * 10, "partial_rotary_factor": 0.5,
    "mlp_layer_types": ["dense"] + ["sparse"] * 39, "moe_routed_scaling_factor": 2.5,
    "moe_apply_router_weight_on_input": False, "use_bidirectional_attention": False,
    "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
}  # fmt: skip
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
    "tie_word_embeddings": True, "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376,
        "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "head_dim": 256,
        "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
        "layer_types": ([WINDOW] * 5 + [FULL]) * 10, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional", "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
            WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}  # fmt: skip

STEP = {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": 128896,
    "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
    "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "sliding_window": 512,
    "layer_types": [FULL, WINDOW, WINDOW, WINDOW] * 12, "num_nextn_predict_layers": 3,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 96,
        "num_attention_groups": 8, "head_dim": 128, "true_head_dim": 128,
    },
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0, "high_freq_factor": 32.0,
    },
    "yarn_only_types": [FULL], "use_head_wise_attn_gate": True, "moe_num_experts": 288,
    "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
    "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0, "norm_expert_weight": True, "use_moe_router_bias": True,
    "swiglu_limits": [0.0] * 43 + [7.0] * 2 + [0.0] * 3, "torch_dtype": "bfloat16",
    "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3,
}  # fmt: skip
_GEMMA4_TEXT = GEMMA4_31B["text_config"]
GEMMA4_26B = GEMMA4_31B | {
    "text_config": _GEMMA4_TEXT  # type: ignore[operator]
    | {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
        "layer_types": ([WINDOW] * 5 + [FULL]) * 5, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
}  # fmt: skip
GEMMA4_E2B = GEMMA4_31B | {
    "text_config": _GEMMA4_TEXT  # type: ignore[operator]
    | {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "num_global_key_value_heads": None,
        "layer_types": ([WINDOW] * 4 + [FULL]) * 7, "attention_k_eq_v": False,
        "sliding_window": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    },
}  # fmt: skip


@dataclass
class Published:
    """A published config.json and what it means.

    Attributes:
        kept: By (window, number of layers): bytes of a token in one of these layers.
        block_sizes: Of groups, in their order, on one rank and on eight, from 64 on.
    """

    config: dict[str, Any]
    heads: dict[str, HeadSizes]
    kept: dict[tuple[int | None, int], int]
    block_sizes: dict[int, tuple[int, ...]]
    more: dict[str, Any] = field(default_factory=dict)


def heads(queries: int, kv: int, key: int, value: int) -> HeadSizes:
    return HeadSizes(num_heads=queries, num_kv_heads=kv, head_dim=key, v_head_dim=value)


PUBLISHED = {
    "mimo_v2_flash": Published(
        MIMO,
        {FULL: heads(64, 4, 192, 128), WINDOW: heads(64, 8, 192, 128)},
        {(None, 9): 4 * (192 + 128) * 2, (129, 39): 8 * (192 + 128) * 2},
        {1: (128, 64, 64, 64, 64, 64), 8: (64, 64, 64, 64, 64, 64)},
        {"value_scale": 0.707, "sink_layers": 39},
    ),
    "mimo_v2_5": Published(
        MIMO
        | {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2"}
        | {"rope_theta": 10000000, "attention_projection_layout": "fused_qkv"},
        {FULL: heads(64, 4, 192, 128), WINDOW: heads(64, 8, 192, 128)},
        {(None, 9): 4 * (192 + 128) * 2, (129, 39): 8 * (192 + 128) * 2},
        {1: (128, 64, 64, 64, 64, 64), 8: (64, 64, 64, 64, 64, 64)},
        {"value_scale": 0.707, "projection_ranks": 4},
    ),
    "step3_5": Published(
        STEP,
        {FULL: heads(64, 8, 128, 128), WINDOW: heads(96, 8, 128, 128)},
        {(None, 12): 8 * 256 * 2, (512, 33): 8 * 256 * 2},
        {1: (64, 64, 64, 64), 8: (64, 64, 64, 64)},
        {"output_gate": "per_head", "num_experts": 288, "num_extra_layers": 3},
    ),
    "laguna_xs": Published(
        LAGUNA,
        {FULL: heads(48, 8, 128, 128), WINDOW: heads(64, 8, 128, 128)},
        {(None, 10): 8 * 256 * 2, (512, 30): 8 * 256 * 2},
        {1: (64, 64, 64, 64), 8: (64, 64, 64, 64)},
        {"output_gate": "per_head"},
    ),
    "gemma4_31b": Published(
        GEMMA4_31B,
        {FULL: heads(32, 4, 512, 512), WINDOW: heads(32, 16, 256, 256)},
        {(None, 10): 4 * 1024 * 2, (1024, 50): 16 * 512 * 2},
        {1: (128, 64, 64, 64, 64, 64), 8: (64, 64, 64, 64, 64, 64)},
        {"attention_scale": 1.0, "shared_projections": 10, "final_softcap": 30.0},
    ),
    "gemma4_26b": Published(
        GEMMA4_26B,
        {FULL: heads(16, 2, 512, 512), WINDOW: heads(16, 8, 256, 256)},
        {(None, 5): 2 * 1024 * 2, (1024, 25): 8 * 512 * 2},
        {1: (128, 64, 64, 64, 64, 64), 8: (64, 128, 128, 128, 128, 128)},
        {"num_experts": 128, "num_experts_per_token": 8, "shared_projections": 5},
    ),
    "gemma4_e2b": Published(
        GEMMA4_E2B,
        {FULL: heads(8, 1, 512, 512), WINDOW: heads(8, 1, 256, 256)},
        # 20 of 35 layers keep nothing.
        {(None, 3): 1024 * 2, (512, 12): 512 * 2},
        {1: (64, 128, 128, 128, 128), 8: (64, 128, 128, 128, 128)},
        {"first_sharing_layer": 15, "wide_layers": 20, "layer_input_size": 256},
    ),
}
each = pytest.mark.parametrize("name", PUBLISHED)


def model_of(config: dict[str, Any], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder, load_format="dummy")


def layout_of(model: ModelConfig, tp_size: int) -> Any:
    return EngineConfig(
        engine_id="e", epoch=1, model=model, cache=CacheConfig(block_size=64),
        parallel=ParallelConfig(tensor_parallel_size=tp_size),
    ).kv_layout  # fmt: skip


@each
def test_heads_of_each_layer(name: str, tmp_path: Path) -> None:
    known = PUBLISHED[name]
    model = model_of(known.config, tmp_path)
    spec = spec_of(model)
    assert isinstance(spec, DenseSpec)
    local = set(spec.window_layers or ())
    for layer in range(model.num_layers):
        assert model.heads_of(layer) == known.heads[WINDOW if layer in local else FULL]
    assert set(model.kinds_of_heads) == set(known.heads.values())
    for field_name, value in known.more.items():
        found = getattr(spec, field_name)
        assert (len(found) if isinstance(found, tuple) else found) == value


@each
def test_bytes_of_a_token(name: str, tmp_path: Path) -> None:
    """A token takes what its heads have, and blocks of all groups fit one page."""
    known = PUBLISHED[name]
    model = model_of(known.config, tmp_path)
    for tp_size, sizes in known.block_sizes.items():
        layout = layout_of(model, tp_size)
        found: dict[tuple[int | None, int], int] = {}
        for group in layout.groups:
            ours = sum(plane.heads * plane.row_bytes for plane in group.planes)
            found[group.window, ours] = found.get((group.window, ours), 0) + len(group.layers)
            assert (
                group.bytes_needed(tp_size) <= layout.page_bytes < 2 * group.bytes_needed(tp_size)
            )
        assert {(window, n): size for (window, size), n in found.items()} == known.kept
        assert tuple(group.block_size for group in layout.groups) == sizes


@each
def test_ranks_share_every_kind_of_heads(name: str, tmp_path: Path) -> None:
    model = model_of(PUBLISHED[name].config, tmp_path)
    check_parallel(model, ParallelConfig(tensor_parallel_size=8))
    with pytest.raises(CheckpointError, match="heads, which 3 tensor-parallel ranks"):
        check_parallel(model, ParallelConfig(tensor_parallel_size=3))


def test_peers_with_other_heads_are_named(tmp_path: Path) -> None:
    ours = layout_of(model_of(MIMO, tmp_path), 1)
    theirs = layout_of(model_of(MIMO | {"swa_v_head_dim": 64}, tmp_path), 1)
    theirs = msgspec.structs.replace(theirs, model_hash=ours.model_hash)
    with pytest.raises(HandshakeMismatch, match=r"groups\[1\].planes\[1\].row_bytes"):
        ours.check_compatible(theirs)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_shared_layers": 59}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 20}, "attention_k_eq_v"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"per_layer_config": {"3": {"head_dim": 128}}}, "per_layer_config"),
    ],
    ids=str,
)
def test_what_gemma4_cannot_mean_yet_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    text = GEMMA4_31B["text_config"] | changes  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=named):
        model_of(GEMMA4_31B | {"text_config": text}, tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads_per_layer": [48]}, "num_attention_heads_per_layer"),
        ({"num_attention_heads_per_layer": [50] * 40}, "num_key_value_heads"),
        ({"gating": "per-token"}, "gating"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
        ({"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping"),
    ],
    ids=str,
)
def test_what_laguna_cannot_mean_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        model_of(LAGUNA | changes, tmp_path)


def test_each_kind_of_step_rotates_by_itself(tmp_path: Path) -> None:
    spec = spec_of(model_of(STEP, tmp_path))
    assert isinstance(spec, DenseSpec) and spec.experts is not None
    full, local = spec.rotary_of(0), spec.rotary_of(1)
    assert (full.theta, full.dim, full.scaling is None) == (5_000_000.0, 64, False)
    assert (local.theta, local.dim, local.scaling) == (10_000.0, 128, None)
    assert spec.experts.dense_layers == (0, 1, 2)
    limits = [(spec.experts.limit_of(i), spec.experts.dense_limit_of(i)) for i in (42, 43, 44)]
    assert limits == [(0.0, 0.0), (7.0, 0.0), (7.0, 16.0)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": [FULL] * 44}, "layer_types"),
        ({"rope_theta": [1.0, 2.0, 3.0] * 15}, "rope_theta"),
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum"),
        ({"attention_other_setting": {"num_attention_groups": 4}}, "attention_other_setting"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
        ({"use_moe_router_bias": False}, "use_moe_router_bias"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation"),
    ],
    ids=str,
)
def test_what_step_cannot_mean_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        model_of(STEP | changes, tmp_path)


def test_bases_by_layer_are_of_no_other_family(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rope_theta"):
        model_of(MIMO | {"rope_theta": [1.0] * 48}, tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swa_num_key_value_heads": 5}, "num_key_value_heads"),
        ({"swa_num_attention_heads": -64}, "num_key_value_heads"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        ({"attention_projection_layout": "by_head"}, "attention_projection_layout"),
    ],
    ids=str,
)
def test_what_mimo_cannot_mean_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        model_of(MIMO | changes, tmp_path)
