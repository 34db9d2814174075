"""Other forms than those that transformers writes are read, or are refused by what they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from engine.frontend.tokenizer import Tokenizer
from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.quantization.reader import read_quantization
from engine.models.registry import spec_of
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec
from engine.quantization import Fp8Scheme, Quantization
from engine.rope import QueryScale
from tests.engine.models.conftest import ROOT
from tests.engine.models.loaded_parameters import check_same, parameters
from tests.engine.models.quantised_checkpoints import (
    FP8_BLOCKS,
    MODELOPT,
    compressed_tensors,
    quantise_checkpoint,
    write_fp8_blocks,
    write_fp8_channels,
)

Copy = Callable[..., Path]
FP8_KV = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True}
_CHANNELS = compressed_tensors({"strategy": "channel"})


@pytest.fixture
def copy(checkpoints: Path, tmp_path: Path) -> Copy:
    """Copies a family's checkpoint, with changes of its config.json."""

    def make(family: str, **changes: Any) -> Path:
        folder = tmp_path / family
        shutil.copytree(checkpoints / family, folder)
        return _with(folder, **changes)

    return make


def _with(folder: Path, file: str = "config.json", **changes: Any) -> Path:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def read(values: dict[str, Any] | None, folder: Path = Path()) -> Quantization:
    found = read_quantization(folder, values)
    assert found is not None
    return found


# Spellings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelled", ["float8_e4m3fn", "torch.float8_e4m3fn", "E4M3", "F8_E4M3"])
def test_a_number_format_may_be_spelled_in_any_way(spelled: str) -> None:
    assert read(FP8_BLOCKS | {"fmt": spelled}) == read(FP8_BLOCKS)


def test_spellings_of_other_fields() -> None:
    types = {"scale_dtype": "bf16", "zp_dtype": "F8_E4M3", "type": "FLOAT", "strategy": "Channel"}
    assert read(compressed_tensors(types)) == read(_CHANNELS)
    assert read(MODELOPT | {"quant_algo": "fp8"}) == read(MODELOPT)
    assert read(MODELOPT | {"quant_method": "ModelOpt"}) == read(MODELOPT)


def test_rotations_of_weights_are_in_the_weights() -> None:
    """SpinQuant's R1 and R2 leave nothing to compute while a model runs; QuIP's rotate inputs."""

    def rotated(*locations: str) -> dict[str, Any]:
        steps = [{"location": one, "targets": ["Linear"], "inverse": False} for one in locations]
        groups = {"R1": {"type": "hadamard", "apply": steps, "head_dim": None}}
        return _CHANNELS | {"transform_config": {"config_groups": groups}}

    assert read(rotated("weight_output", "weight_input")) == read(_CHANNELS)
    words = r"transform_config\.config_groups\.R1\.apply\.location: rotations of 'input'"
    with pytest.raises(UnsupportedField, match=words):
        read(rotated("weight_output", "input"))


@pytest.mark.parametrize("said", [{"mode": "mxfp4"}, {"model.embed_tokens": {"bits": 6}}])
def test_weights_of_mlx_are_named(said: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField, match=r"mode: weights as MLX packs them"):
        read({"group_size": 32, "bits": 4} | said)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "bf16", "BF16"])
def test_spellings_of_the_dtype(dtype: str, copy: Copy) -> None:
    assert load_model_config(copy("llama", dtype=dtype)).dtype == "bfloat16"


def test_minimax_m2_as_published(checkpoints: Path, tmp_path: Path) -> None:
    """M2 to M2.7: the block of their config.json."""
    config = {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    leave = ("block_sparse_moe.gate",)
    writer = write_fp8_blocks((128, 128))
    quantise_checkpoint(checkpoints / "minimax_m2", quantised, plain, writer, config, leave)
    check_same(quantised, plain)


# ModelOpt and the KV cache --------------------------------------------------------------------


def test_modelopts_block_without_its_name(tmp_path: Path) -> None:
    """As ModelOpt 0.29 to 0.31 convert hf_quant_config.json, which lies beside it."""
    block = {name: value for name, value in MODELOPT.items() if name != "quant_method"}
    block |= {"kv_cache_scheme": "FP8", "config_groups": {"group_0": {}}}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    found = read(block, tmp_path)
    assert (found.method, found.kv_cache) == ("modelopt", "fp8")
    assert found.rules == read(MODELOPT).rules


@pytest.mark.parametrize(
    "config",
    [
        {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": "dense",
            "config_groups": {},
            "kv_cache_scheme": FP8_KV,
        },
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    ],
    ids=["llm-compressor 0.14", "modelopt"],
)
def test_only_the_kv_cache_is_quantised(config: dict[str, Any], copy: Copy) -> None:
    folder = copy("llama", quantization_config=config)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        tensors |= {
            f"model.layers.{layer}.self_attn.{name}_scale": torch.full((2, 1, 1), 0.5)
            for name in "kv"
        }
    save_file(tensors, folder / "model.safetensors")
    model = load_model_config(folder)
    assert model.quantization is not None
    assert (model.quantization.rules, model.quantization.kv_cache) == ((), "fp8")
    parameters(folder, 0, 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MODELOPT | {"kv_cache_scheme": "NVFP4"}, "asks for a KV cache in 'NVFP4'"),
        (MODELOPT | {"quant_algo": "NVFP4_SVD"}, "asks for weights quantised by 'NVFP4_SVD'"),
        (MODELOPT | {"quant_algo": 8}, "asks for weights quantised by 8"),
        ({"quant_method": "gptq", "bits": 3}, "asks for weights of 3 bits"),
        (_CHANNELS | {"format": "dense"}, "asks for weights stored as 'dense'"),
        (FP8_BLOCKS | {"rotation": "hadamard"}, "asks for rotation = 'hadamard'"),
    ],
)
def test_a_refusal_says_what_a_field_means(config: dict[str, Any], words: str, copy: Copy) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_model_config(copy("llama", quantization_config=config))


# What is computed together --------------------------------------------------------------------


def test_parts_of_a_gemm_that_are_quantised_differently_are_one_sentence(
    checkpoints: Path, tmp_path: Path
) -> None:
    """Named before a worker starts."""
    left = "model.layers.0.self_attn.q_proj"
    config = _CHANNELS | {"ignore": ["lm_head", left]}
    folders = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(checkpoints / "llama", *folders, write_fp8_channels, config, (left,))
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folders[0])
    assert caught.value.fault.startswith(f"quantises {left}, model.layers.0.self_attn.k_proj, ")
    assert "list all of them" in caught.value.cure


def test_an_expert_that_is_not_quantised_as_the_others_is_named(
    checkpoints: Path, tmp_path: Path
) -> None:
    left = "model.layers.1.block_sparse_moe.experts.2.w1"
    config = FP8_BLOCKS | {"modules_to_not_convert": [left]}
    folders = tmp_path / "quantised", tmp_path / "plain"
    writer = write_fp8_blocks((128, 128))
    quantise_checkpoint(checkpoints / "mixtral", *folders, writer, config, ("gate.", left))
    with pytest.raises(
        CheckpointError, match="lacks .*experts.2.w1.weight_scale_inv, of layers that"
    ):
        parameters(folders[0], 0, 1)


def test_windows_by_letters(copy: Copy) -> None:
    """EXAONE 4 has `LLLG`; the last layer sees everything."""
    by_letters = copy("exaone4", sliding_window_pattern="LLLG", layer_types=None)
    letters = spec_of(load_model_config(by_letters))
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    assert isinstance(letters, DenseSpec) and letters.unrotated_layers == (3,)
    assert letters == spec_of(load_model_config(_with(by_letters, layer_types=kinds)))


def test_intern_s2_is_qwen_with_one_more_tower(checkpoints: Path, copy: Copy) -> None:
    name = "InternS2PreviewForConditionalGeneration"
    folder = copy("qwen3_5_moe_images", architectures=[name])
    tensors = load_file(folder / "model.safetensors")
    more = {"model.time_series.encoder.weight": torch.ones(3)}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    check_same(folder, checkpoints / "qwen3_5_moe_images")


def test_telechat_has_a_yarn_of_its_own(checkpoints: Path, copy: Copy) -> None:
    """Its `attention_factor` is 1 + 0.07 log(factor): TeleChat3-36B's config.json names the kind
    alone. The checkpoint compared with transformers has the number itself."""
    rope = json.loads((checkpoints / "telechat3" / "config.json").read_text())["rope_parameters"]
    rope = {**rope, "rope_type": "telechat3-yarn", "type": "telechat3-yarn"}
    del rope["attention_factor"]
    check_same(copy("telechat3", rope_parameters=rope), checkpoints / "telechat3")


def test_sarvam_has_another_name_for_yarn(checkpoints: Path, copy: Copy) -> None:
    folder = checkpoints / "sarvam_mla"
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    older = {**rope, "type": "deepseek_yarn"}
    del older["rope_type"]
    published = {"rope_scaling": older, "rope_parameters": None, "rope_theta": theta}
    check_same(copy("sarvam_mla", **published), folder)


def test_no_query_is_scaled_where_no_sequence_gets_that_far(checkpoints: Path) -> None:
    spec = spec_of(load_model_config(checkpoints / "ministral3", max_model_len=48))
    assert isinstance(spec, DenseSpec) and spec.query_scale is None
    spec = spec_of(load_model_config(checkpoints / "ministral3", max_model_len=49))
    assert isinstance(spec, DenseSpec) and spec.query_scale == QueryScale(beta=0.4, length=48)


def test_ling_is_sarvam_by_another_name(checkpoints: Path, copy: Copy) -> None:
    """Settings that only Ling 2.0 has are read."""
    more = {"score_function": "sigmoid", "use_qk_norm": True, "moe_router_enable_expert_bias": True}
    folder = copy("sarvam_moe", architectures=["BailingMoeV2ForCausalLM"], **more)
    check_same(folder, checkpoints / "sarvam_moe")
    with pytest.raises(CheckpointError, match="score_function"):
        load_model_config(_with(folder, score_function="softmax"))


def test_activations_of_ling_3_have_the_limits_that_its_program_leaves_out(copy: Copy) -> None:
    """The authors' modeling code and transformers 5.24 do not read these lists of Ling-3.0-flash,
    which it was trained with."""
    lists = {"expert_swiglu_limit_list": [0, 0, None, 7], "share_expert_swiglu_limit_list": [0] * 4}
    spec = spec_of(load_model_config(copy("ling3", **lists)))
    assert isinstance(spec, DenseSpec) and spec.experts is not None
    assert spec.experts.limits == (0.0, 0.0, 0.0, 7.0) and spec.experts.dense_limits == ()


@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        ("internlm3", "qkv_bias", {"qkv_bias": True}),
        ("internlm3", "bias", {"bias": True}),
        ("iquestcoder", "clip_qkv", {"clip_qkv": 8.0}),
        ("ling3", "no_kda_lora", {"no_kda_lora": False}),
        ("ling3", "linear_attention", {"linear_attention": "lightning"}),
        ("kimi_linear", "mla_use_nope", {"mla_use_nope": False}),
        ("ring2_5", "linear_silu", {"linear_silu": True}),
        ("ring2_5", "use_qk_norm", {"use_qk_norm": False}),
        ("ring2_5", "group_norm_size", {"group_norm_size": 3}),
        ("ring_linear", "use_qkv_bias", {"use_qkv_bias": True}),
        ("minimax_text", "postnorm", {"postnorm": False}),
        ("minimax_text", "layernorm_mlp_beta", {"mlp_beta_factor": 0.5}),
        ("minimax_text", "layernorm_mlp_alpha", {"mlp_alpha_factor": 0.5}),
        ("minimax_text", "shared_intermediate_size", {"shared_intermediate_size": 96}),
        ("minimax_text", "num_attention_heads", {"num_attention_heads": 6, "head_dim": 24}),
        (
            "kimi_linear",
            "linear_attn_config",
            {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2, 3, 5]}},
        ),
    ],
)
def test_what_no_release_of_a_family_has_is_refused(
    family: str, name: str, changes: dict[str, Any], copy: Copy
) -> None:
    with pytest.raises(CheckpointError, match=rf"\({name}\)"):
        load_model_config(copy(family, **changes))


def test_ring_2_5_as_published(checkpoints: Path, copy: Copy) -> None:
    """Its tensors have names of Ling 2.0."""
    folder = copy("ring2_5")
    path = folder / "model.safetensors"
    names = {
        ".self_attn.": ".attention.", ".o_proj.": ".dense.", ".q_norm.": ".query_layernorm.",
        ".k_norm.": ".key_layernorm.", "embed_tokens": "word_embeddings",
        "e_score_correction_bias": "expert_bias",
    }  # fmt: skip
    tensors = load_file(path)
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert "model.layers.0.attention.query_key_value.weight" in tensors
    save_file(tensors, path, metadata={"format": "pt"})
    check_same(folder, checkpoints / "ring2_5")


def test_minimax_text_as_published(checkpoints: Path, copy: Copy) -> None:
    """Its config.json says by numbers what transformers says by names."""
    places = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    published = {f"layernorm_{name}_alpha": 1.7 for name in places.values()}
    folder = copy(
        "minimax_text",
        architectures=["MiniMaxM1ForCausalLM"],
        attn_type_list=[0, 0, 1, 0],
        layer_types=None,
        postnorm=True,
        shared_intermediate_size=0,
        **published,
        **{f"{name}_alpha_factor": None for name in places},
    )
    check_same(folder, checkpoints / "minimax_text")


def test_a_model_that_speaks(checkpoints: Path, tmp_path: Path) -> None:
    """The text part of the thinker is served."""
    plain = checkpoints / "qwen3_moe_some_layers_tied"
    text = json.loads((plain / "config.json").read_text())
    del text["architectures"]
    thinker = {"text_config": text, "vision_config": {}, "audio_config": {}}
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": thinker,
        "talker_config": {"text_config": {"hidden_size": 8}},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"thinker.{n}": t for n, t in load_file(plain / "model.safetensors").items()}
    for other in ("thinker.visual.patch_embed", "thinker.audio_tower.conv", "talker.model.norm"):
        tensors[f"{other}.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    check_same(tmp_path, plain)


@pytest.mark.parametrize("is_split", [False, True])
def test_special_tokens_that_are_split_are_text(is_split: bool, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "cli" / "demo_checkpoint" / name, tmp_path)
    _with(tmp_path, "tokenizer_config.json", split_special_tokens=is_split)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = f"Ada {theirs.eos_token} Ada"
    expected = theirs(text)["input_ids"]
    assert Tokenizer.from_folder(tmp_path).encode(text) == expected
    assert (theirs.eos_token_id in expected[1:-1]) is not is_split


# Names and numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama3_rope_tied_sharded", "qwen3_tied", "glm4_moe"])
def test_a_checkpoint_of_the_bare_model(family: str, checkpoints: Path, tmp_path: Path) -> None:
    """Saved by `AutoModel`, whose tensors have no `model.` in front; the head is beside them."""
    AutoModel.from_pretrained(checkpoints / family).save_pretrained(tmp_path)
    shutil.copy(checkpoints / family / "config.json", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" in tensors
    if family == "glm4_moe":
        whole = load_file(checkpoints / family / "model.safetensors")
        tensors["lm_head.weight"] = whole["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_same(tmp_path, checkpoints / family)


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_numbers_that_python_writes_into_json(number: str, copy: Copy) -> None:
    folder = copy("llama")
    before = load_model_config(folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        text = path.read_text() if path.is_file() else "{}"
        more = f'{{"time_step_limit": [0.0, {number}]' + (", " if len(text) > 2 else "")
        path.write_text(text.replace("{", more, 1))
    assert load_model_config(folder) == before
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', f'"rms_norm_eps": {number}'))
    with pytest.raises(CheckpointError, match=r"asks for the number .* \(rms_norm_eps\)"):
        load_model_config(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": "\xff"}'])
def test_json_that_cannot_be_read_names_its_file(text: str, copy: Copy) -> None:
    folder = copy("llama")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folder)
    assert caught.value.path == str(folder / "config.json")


def test_a_model_whose_layers_all_have_experts_needs_no_dense_size(copy: Copy) -> None:
    folder = copy("glm4_moe", first_k_dense_replace=0, intermediate_size=None)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["intermediate_size"]
    config.pop("mlp_layer_types", None)
    path.write_text(json.dumps(config))
    spec = spec_of(load_model_config(folder))
    assert isinstance(spec, DenseSpec) and spec.experts is not None
    assert spec.experts.dense_layers == ()
    path.write_text(json.dumps(config | {"first_k_dense_replace": 1}))
    with pytest.raises(CheckpointError, match="intermediate_size"):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("model.embed_tokens.weight_scale", "numbers of a quantisation of which config.json says"),
        ("model.layers.0.self_attn.k_proj.k_bias", "numbers of a quantisation"),
        ("model.layers.0.mlp.extra.weight", "tensors that the model does not use"),
    ],
)
def test_left_over_tensors_are_not_called_a_broken_download(
    more: str, words: str, copy: Copy
) -> None:
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {more: torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as caught:
        parameters(folder, 0, 1)
    assert more in caught.value.fault and "download" not in str(caught.value)


@pytest.mark.parametrize(
    ("end", "beside", "tool"),
    [(".weight._data", ".weight._scale", "optimum-quanto"), (".W_q", ".zero", "HQQ")],
)
def test_packed_weights_of_which_config_says_nothing(
    end: str, beside: str, tool: str, copy: Copy
) -> None:
    """As optimum-quanto 0.2.7 (`save_pretrained`) and HQQ 0.2.8 (`save_to_safetensors`) write them:
    no `quantization_config`."""
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    plain = [name for name in tensors if name.endswith("_proj.weight")]
    for name in plain:
        layer = name.removesuffix(".weight")
        tensors[layer + end] = tensors.pop(name).to(torch.int8)
        tensors[layer + beside] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"weights as {tool} packs them") as caught:
        parameters(folder, 0, 1)
    assert "download" not in str(caught.value)


def test_schemes_are_as_spelled() -> None:
    [rule] = read(FP8_BLOCKS | {"fmt": "float8_e4m3fn"}).rules
    assert isinstance(rule.scheme, Fp8Scheme) and rule.scheme.block == (128, 128)
