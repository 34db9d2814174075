"""Tests that 4-bit checkpoints of every layout are served as the weights that they mean: in plain
numbers, and packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.config import EngineConfig
from engine.layers.feed_forward.sparse_mlp import Experts
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.quantised.int4_linear import InputOrderError, Int4Linear
from engine.layers.methods.registry import UnsupportedScheme
from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.models.quantization.reader import read_quantization
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ExpertRanks, ParallelPlace
from engine.quantization import Int4Scheme
from kv_transfer.config import KVTransferConfig
from tandem_kernels import ops
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over
from tests.engine.models.int4_checkpoints import LAYOUTS, awq, ct_int4, gptq, write_awq
from tests.engine.models.loaded_parameters import parameters
from tests.engine.models.parity_cases import prompts
from tests.engine.models.quantised_checkpoints import compressed_tensors, quantise_checkpoint
from tests.engine.models.rank_process import make_paged_model
from tests.engine.models.reference_models import GreedyAnswers, reference, reference_logits
from tests.engine.models.test_logit_parity import relative_error
from tests.engine.models.test_quantised_weights import refusal
from tests.engine.parallel.fake_group import FakeGroup

Pair = tuple[Path, Path]
MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(checkpoints: Path, tmp_path: Path) -> MakePair:
    """Writes a family quantised, and plain with the same meaning."""

    def make(family: str, layout: str, leave: tuple[str, ...] = ()) -> Pair:
        writer, config = LAYOUTS[layout]
        quantised, plain = tmp_path / "quantised", tmp_path / "plain"
        left = ("mlp.gate.", "block_sparse_moe.gate.", *leave)
        quantise_checkpoint(checkpoints / family, quantised, plain, writer, config, left)
        return quantised, plain

    return make


@pytest.fixture
def packed_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes linear layers keep packed weights, which plain torch then computes with: up to 8 rows
    from them, more from weights that are written out."""
    policy = GemmPolicy(int4_rows=8)
    monkeypatch.setattr(GemmPolicy, "choose", lambda *arguments: policy)


def model_of(folder: Path, rank: int, size: int, *, spreads_experts: bool = False) -> nn.Module:
    config = EngineConfig(engine_id="load", epoch=1, model=load_model_config(folder))
    config = replace(config, model=replace(config.model, dtype="float32"))
    ranks = ExpertRanks(rank, size, are_whole=True) if spreads_experts else None
    place = ParallelPlace(range(config.model.num_layers), FakeGroup(rank, size), ep=ranks)
    model = create_model(config, place, "cpu")
    load_weights(model, config, lambda fraction: None)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_every_rank_loads_what_the_numbers_mean(
    family: str, layout: str, make_pair: MakePair
) -> None:
    """Ranks cut inside of groups, too."""
    quantised, plain = make_pair(family, layout)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        ours, expected = (parameters(folder, rank, size) for folder in (quantised, plain))
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(ours[name], tensor), (name, rank, size)


def test_sizes_that_eight_does_not_divide(make_pair: MakePair) -> None:
    """DeepSeek's latent of 20 numbers is packed into three words."""
    quantised, plain = make_pair("deepseek_v3_yarn", "ct channels")
    ours, expected = (parameters(folder, 1, 2) for folder in (quantised, plain))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.usefixtures("packed_on_cpu")
def test_packed_layers_hold_what_the_numbers_mean(
    layout: str, rank: int, size: int, make_pair: MakePair
) -> None:
    """Layers whose groups ranks would cut are plain: groups of 16, and the down projection's 48
    inputs of each of two ranks."""
    quantised, plain = (
        dict(model_of(f, rank, size).named_modules()) for f in make_pair("llama", layout)
    )
    num_packed = 0
    for name, expected in plain.items():
        if not isinstance(expected, MergedColumnParallelLinear | RowParallelLinear):
            continue
        ours = quantised[name]
        assert isinstance(ours, MergedColumnParallelLinear | RowParallelLinear)
        if not isinstance(ours.method, Int4Linear):
            assert torch.equal(ours.weight, expected.weight)
            continue
        num_packed += 1
        weight = ops.int4_dequantise(ours.packed, ours.groups, expected.weight.shape[1])
        if ours.input_order is None:
            assert torch.equal(weight, expected.weight)
        else:
            assert torch.equal(weight, expected.weight[:, ours.input_order])
    per_layer = 0 if layout == "gptq" else 4 if size == 1 else 2 if "ordered" in layout else 3
    assert num_packed == 3 * per_layer


@pytest.mark.parametrize("layout", ["awq", "gptq asymmetric", "ct channels"])
@pytest.mark.usefixtures("packed_on_cpu")
def test_packed_experts_hold_what_the_numbers_mean(layout: str, make_pair: MakePair) -> None:
    """No group is cut: of 96 units the first of two ranks has 64."""
    quantised, plain = make_pair("mixtral", layout)
    ranks = [_experts(quantised, rank, 2) for rank in (0, 1)]
    whole = _experts(plain, 0, 1)
    assert [rank.sizes.width for rank in ranks] == [64, 32]
    for expert in range(4):
        gates, ups, downs = [], [], []
        for rank in ranks:
            hidden, width = rank.sizes.hidden, rank.sizes.width
            first = ops.int4_dequantise(rank.packed13[expert], rank.groups13[expert], hidden)
            gates.append(first[:width])
            ups.append(first[width:])
            downs.append(ops.int4_dequantise(rank.packed2[expert], rank.groups2[expert], width))
        assert torch.equal(torch.cat(gates + ups), whole.w13[expert])
        assert torch.equal(torch.cat(downs, dim=1), whole.w2[expert])


@pytest.mark.parametrize("layout", ["awq", "ct channels"])
@pytest.mark.usefixtures("packed_on_cpu")
def test_ranks_hold_whole_packed_experts(layout: str, make_pair: MakePair) -> None:
    quantised, plain = make_pair("mixtral", layout)
    whole, held = _experts(plain, 0, 1), list[int]()
    for rank in (0, 1):
        ours = _experts(quantised, rank, 2, spreads_experts=True)
        for own, expert in enumerate(ours.sizes.held):
            held.append(expert)
            sizes = ours.sizes.hidden, ours.sizes.width
            first = ops.int4_dequantise(ours.packed13[own], ours.groups13[own], sizes[0])
            assert torch.equal(first, whole.w13[expert])
            second = ops.int4_dequantise(ours.packed2[own], ours.groups2[own], sizes[1])
            assert torch.equal(second, whole.w2[expert])
    assert held == [0, 1, 2, 3]


def _experts(folder: Path, rank: int, size: int, *, spreads_experts: bool = False) -> Experts:
    model = model_of(folder, rank, size, spreads_experts=spreads_experts)
    return next(m for m in model.modules() if isinstance(m, Experts))


@pytest.mark.usefixtures("packed_on_cpu")
def test_experts_of_other_sizes_are_refused_by_name(make_pair: MakePair) -> None:
    folder, _ = make_pair("mixtral", "gptq")
    with pytest.raises(UnsupportedScheme, match=r"layers\.0.*experts .* groups of 16"):
        model_of(folder, 0, 1)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", "awq"),
        ("qwen2", "gptq asymmetric"),
        ("qwen2", "gptq ordered"),
        ("qwen2", "ct"),
        ("mixtral", "ct asymmetric"),
        ("mixtral", "gptq ordered"),
    ],
)
@pytest.mark.usefixtures("packed_on_cpu")
def test_logits_of_packed_weights_are_those_of_plain_ones(
    family: str, layout: str, make_pair: MakePair
) -> None:
    quantised, plain = make_pair(family, layout)
    ours, expected = (
        make_paged_model(folder, ParallelGroup(0, 1)).prefill(prompts()[:3], 13)
        for folder in (quantised, plain)
    )
    for first, second in zip(ours, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("int4_rows", [8, 256], ids=["written out", "packed"])
@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [
        ("llama", "awq", "float16"),
        ("qwen2", "gptq ordered", "float16"),
        ("llama", "ct", "bfloat16"),
    ],
)
def test_a_gpu_is_as_exact_as_transformers(
    family: str,
    layout: str,
    dtype: Any,
    int4_rows: int,
    make_pair: MakePair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compares with float32 on what the numbers mean; transformers in half precision is the
    yardstick for how much error is natural."""
    quantised, plain = make_pair(family, layout)
    policy = GemmPolicy(int4_rows=int4_rows)
    monkeypatch.setattr(GemmPolicy, "choose", lambda *arguments: policy)
    exact, theirs = reference(plain), reference(plain, getattr(torch, dtype))
    paged = make_paged_model(quantised, ParallelGroup(0, 1), dtype, "cuda")
    for prompt, logits in zip(prompts(), paged.prefill(prompts(), 13), strict=True):
        truth = reference_logits(exact, prompt)
        natural = relative_error(reference_logits(theirs, prompt).float(), truth)
        assert relative_error(logits.cpu(), truth) < 1.5 * natural < 0.15


@pytest.mark.usefixtures("packed_on_cpu")
def test_parts_of_a_layer_must_order_their_inputs_alike(make_pair: MakePair) -> None:
    folder, _ = make_pair("llama", "gptq ordered")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.g_idx"
    stored[name] = stored[name].flip(0).contiguous()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(InputOrderError, match=r"k_proj\.g_idx .* desc_act"):
        model_of(folder, 0, 1)


def test_layers_that_are_not_converted_stay_plain(checkpoints: Path, tmp_path: Path) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    config = gptq(16, dynamic={r"-:.*\.layers\.(?:1|7)\.mlp": {}}) | {
        "modules_in_block_to_quantize": [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        ]
    }
    writer, _ = LAYOUTS["gptq"]
    left = "o_proj", "layers.1.mlp"
    quantise_checkpoint(checkpoints / "llama", quantised, plain, writer, config, left)
    ours, expected = (parameters(folder, 0, 1) for folder in (quantised, plain))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_two_nodes_answer_as_the_plain_weights_do(make_pair: MakePair) -> None:
    quantised, plain = make_pair("llama", "awq")
    with ExitStack() as stack:
        nodes = []
        for role, ranks in (("kv_producer", 2), ("kv_consumer", 1)):
            config = engine_config(
                load_model_config(quantised),
                block_size=16,
                num_blocks=160,
                tp_size=ranks,
                kv_transfer=KVTransferConfig(kv_role=role, num_streams=2),  # type: ignore[arg-type]
            )
            nodes.append(GroupedNode.start(config))
            stack.callback(nodes[-1].shutdown)
        asked = {str(index): prompt for index, prompt in enumerate(prompts())}
        hand_over(*nodes, asked, GreedyAnswers(reference(plain)))


_KIMI_K2_THINKING = ct_int4(32) | {
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]
}


@pytest.mark.parametrize(
    ("layer", "is_quantised"),
    [
        ("mlp.experts.0.up_proj", True),
        ("mlp.experts.0.down_proj", True),
        ("mlp.shared_experts.up_proj", False),
        ("mlp.gate_proj", False),
        ("self_attn.o_proj", False),
    ],
)
def test_of_some_checkpoints_experts_alone_are_quantised(layer: str, is_quantised: bool) -> None:
    quantization = read_quantization(Path(), _KIMI_K2_THINKING)
    assert quantization is not None
    scheme = quantization.scheme_of(f"model.layers.1.{layer}")
    expected = Int4Scheme(layout="compressed-tensors", group_size=32, symmetric=True)
    assert scheme == (expected if is_quantised else None)


_PUBLISHED = [
    # hugging-quants' Llama 3.1 in AWQ
    awq(128) | {"backend": "autoawq", "do_fuse": False, "exllama_config": None,
                "fuse_max_seq_len": None, "modules_to_fuse": None},
    # Qwen2.5 in GPTQ
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
     "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True,
     "damp_percent": 0.01, "dataset": None, "exllama_config": {"version": 1},
     "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None,
     "modules_in_block_to_quantize": None, "pad_token_id": None, "tokenizer": None,
     "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
    # GPTQModel
    gptq(128, dynamic=None, pack_dtype="int32", static_groups=False, damp_auto_increment=0.0025,
         meta={"quantizer": ["gptqmodel:1.4.4"], "uri": "", "static_groups": False}),
    # AutoRound in GPTQ's form, and in AWQ's
    gptq(128, amp=True, autoround_version="0.4.1", batch_size=8, data_type="int",
         enable_minmax_tuning=True, enable_norm_bias_tuning=False, enable_quanted_input=True,
         gradient_accumulate_steps=1, iters=512, low_gpu_mem_usage=False, lr=0.001953125,
         minmax_lr=0.001953125, nsamples=512, provider="auto-round", seqlen=2048,
         scale_dtype="torch.float16", to_quant_block_names=None),
    awq(128) | {"autoround_version": "0.4.5", "data_type": "int", "iters": 200, "nsamples": 128,
                "provider": "auto-round", "seqlen": 2048, "sym": False, "train_bs": 8},
    # GPTQModel in AWQ's form
    awq(128) | {"checkpoint_format": "gemm", "desc_act": False, "format": "gemm",
                "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.0.0"]}, "method": "awq",
                "pack_dtype": "int32", "sym": True},
    # llm-compressor
    ct_int4(128, actorder="weight") | {
        "sparsity_config": {"format": "dense", "global_sparsity": 0.14, "ignore": [],
                            "registry_requires_subclass": False, "targets": []}},
]  # fmt: skip


_PUBLISHERS = [
    "awq", "gptq", "gptqmodel", "auto-round gptq", "auto-round awq", "gptqmodel awq",
    "llm-compressor",
]  # fmt: skip


@pytest.mark.parametrize("config", _PUBLISHED, ids=_PUBLISHERS)
def test_what_publishers_write_is_read(config: dict[str, Any]) -> None:
    quantization = read_quantization(Path(), config)
    assert quantization is not None
    scheme = quantization.scheme_of("model.layers.1.mlp.down_proj")
    assert isinstance(scheme, Int4Scheme)
    assert (scheme.group_size, scheme.ordered_by_activation) == (128, False)
    assert quantization.scheme_of("lm_head") is None


_FP8_GROUP = compressed_tensors({"strategy": "channel"})["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (awq(128) | {"bits": 8}, ("quantization_config.bits", "8")),
        (awq(128) | {"version": "gemv"}, ("'gemv'", "quantization_config.version")),
        (awq(128) | {"format": "marlin"}, ("'marlin'", "quantization_config.format")),
        (gptq(128, data_type="nv_fp"), ("'nv_fp'", "quantization_config.data_type")),
        (awq(0), ("quantization_config.group_size",)),
        (gptq(128) | {"bits": 3}, ("quantization_config.bits", "3")),
        (gptq(128, checkpoint_format="marlin"), ("'marlin'", "checkpoint_format")),
        (gptq(128, is_marlin_format=True), ("is_marlin_format",)),
        (gptq(128, lm_head=True), ("quantization_config.lm_head",)),
        (gptq(128, pack_dtype="int16"), ("pack_dtype",)),
        (gptq(128, dynamic={r"+:.*mlp": {"bits": 2}}), ("dynamic", "bits")),
        (gptq(128, dynamic={"-:(": {}}), ("dynamic",)),
        (ct_int4(128, num_bits=3), ("3 bits", "num_bits")),
        (ct_int4(128) | {"format": "float-quantized"}, ("float-quantized", "num_bits")),
        (ct_int4(-1, strategy="group"), ("weights.group_size", "-1")),
        (ct_int4(128, strategy="attn_head"), ("weights.strategy",)),
        (
            ct_int4(128)
            | {
                "config_groups": {
                    "g": {
                        **_FP8_GROUP,
                        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                    }
                }
            },
            ("8-bit integers beside inputs in e4m3",),
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[-1],
)
def test_what_is_not_here_is_refused_by_name(
    config: dict[str, Any], words: tuple[str, ...], checkpoints: Path, tmp_path: Path
) -> None:
    quantised = tmp_path / "quantised"
    quantise_checkpoint(checkpoints / "llama", quantised, tmp_path / "plain", write_awq(32), config)
    message = refusal(quantised, config)
    for word in words:
        assert word in message


def test_words_of_another_type_are_refused_by_the_tensors_name(make_pair: MakePair) -> None:
    folder, _ = make_pair("llama", "awq")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.qweight"
    save_file(stored | {name: stored[name].float()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has .*up_proj\.qweight in F32; .* I32"):
        parameters(folder, 0, 1)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"up_proj\.scales of shape|qzeros of shape|scales of"
    ):
        parameters(folder, 0, 1)
