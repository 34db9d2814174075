"""DeepSeek-V4: what is kept of a token, what goes from node to node, what a published checkpoint
holds, and what is refused. Parity with transformers is asked of it where it is of all others; here
prompts are long enough for rows of 128 tokens.

What went wrong elsewhere, and the test that would have seen it:

    caches with other block lengths shared   `test_nodes_of_other_sizes_hand_over_windows_and_rows`
    a base address (vLLM 57661)
    low accuracy behind a transfer           the same: tokens equal those of one node, at and beside
    (vLLM 46807)                             every edge of a row and of the window
    drafts' window stays behind              the same: so do drafts
    (SGLang 30461)
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from engine.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.executor.uniproc_executor import UniprocExecutor
from engine.kv_cache.capacity import blocks_a_token
from engine.models.checkpoint import CheckpointError, check_parallel, load_model_config
from engine.models.draft_checkpoint import read_draft
from engine.parallel.distributed import ParallelGroup
from kv_transfer.config import KVRole, KVTransferConfig
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over
from tests.engine.models.engine_rank import EngineRank
from tests.engine.models.family import Family
from tests.engine.models.fp4_checkpoints import write_mxfp4, write_nvfp4
from tests.engine.models.parity_cases import VOCAB
from tests.engine.models.quantised_checkpoints import to_e4m3, write_fp8_blocks
from tests.engine.models.rank_process import make_paged_model
from tests.engine.models.reference_models import (
    GreedyAnswers,
    reference,
    reference_logits,
    save_checkpoint,
)
from tests.engine.models.sparse_families import V4
from tests.engine.stages.test_stages import running, stage_config
from tests.engine.worker.drafts.stream_drafts import v4_mtp_reference, write_v4_with_mtp
from tests.engine.worker.drafts.test_network_drafters import engine_config as drafting_config
from tests.engine.worker.drafts.test_network_drafters import watch, with_drafter
from tests.engine.worker.one_engine import OneEngine

NUM_TOKENS = 8
LENGTHS = [3, 4, 127, 128, 129, 255, 256, 381, 512, 515, 700]
LONG = Family(
    DeepseekV4ForCausalLM,
    DeepseekV4Config,
    V4
    | {
        "num_hidden_layers": 4, "max_position_embeddings": 1024, "sliding_window": 128,
        "layer_types": [
            "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention", "heavily_compressed_attention",
        ],
        "compress_rates": None, "index_topk": 24,
    },
)  # fmt: skip
"""Rows of 4 tokens, of which a token sees 24, and of 128, beside a window of 128."""


def asked() -> dict[str, list[int]]:
    """Returns prompts that end at and beside the edges of rows and of the window. Each begins with
    those that are shorter."""
    generator = torch.Generator().manual_seed(5)
    longest = torch.randint(VOCAB, (LENGTHS[-1],), generator=generator).tolist()
    return {str(length): longest[:length] for length in LENGTHS}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoints") / "deepseek_v4"
    write_v4_with_mtp(folder, LONG)
    for path in (folder, folder.with_name("whole")):
        _heed_rows(path / "model.safetensors")
    return folder


def _heed_rows(file: Path) -> None:
    """Gives keys of rows the weight that a few of them need beside a window of 128 tokens."""
    weights = load_file(file)
    names = [name for name in weights if name.endswith("attn.compressor.norm.weight")]
    assert len(names) == LONG.changes["num_hidden_layers"]
    save_file(
        weights | {name: 4 * weights[name] for name in names}, file, metadata={"format": "pt"}
    )


@pytest.fixture(scope="module")
def oracle(long: Path) -> GreedyAnswers:
    return GreedyAnswers(reference(long))


def test_long_prompts_are_cut_and_found_again(long: Path, oracle: GreedyAnswers) -> None:
    """Steps end anywhere in a row; blocks are too few for all requests at once, and what one leaves
    in them is seen by none of the others but as a prefix."""
    config = EngineConfig(
        engine_id="rows",
        epoch=1,
        model=load_model_config(long, max_model_len=LENGTHS[-1] + NUM_TOKENS),
        cache=CacheConfig(block_size=1, num_blocks=390),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=50),
    )
    engine = EngineRank(config, 0, "")
    for turn in range(2):
        found = engine.run({f"{turn}.{name}": p for name, p in asked().items()}, NUM_TOKENS)
        for name, prompt in asked().items():
            answer = found[f"{turn}.{name}"].tokens
            assert answer == oracle.tokens(prompt, NUM_TOKENS, answer), name
    stats = engine.stats
    assert min(stats.num_evicted_blocks, stats.prefix_cache_hits) > 0
    engine.close()


@pytest.mark.parametrize(
    ("ranks", "sizes", "drafts"), [((1, 2), (1, 2), False), ((2, 1), (64, 32), True)]
)
def test_nodes_of_other_sizes_hand_over_windows_and_rows(
    ranks: tuple[int, int], sizes: tuple[int, int], drafts: bool, long: Path, oracle: GreedyAnswers
) -> None:
    with ExitStack() as stack:
        nodes = []
        for role, size, tp_size in zip(("kv_producer", "kv_consumer"), sizes, ranks, strict=True):
            kv = KVTransferConfig(kv_role=role, transports="stream", num_streams=2)  # type: ignore[arg-type]
            config = engine_config(
                load_model_config(long), block_size=size, num_blocks=4000, tp_size=tp_size,
                kv_transfer=kv, chunk=150,
            )  # fmt: skip
            if drafts:
                drafting = with_drafter(config, "mtp", long)
                query_len = 1 if role == "kv_producer" else drafting.decode_query_len
                config = replace(drafting, decode_query_len=query_len)
            assert drafts == any(group.blocks_of >= 0 for group in config.kv_layout.groups)
            nodes.append(GroupedNode.start(config))
            stack.callback(nodes[-1].shutdown)
        edges = {name: asked()[name] for name in ("3", "127", "128", "129", "515", "700")}
        executor = nodes[1].executor
        found = watch(executor._worker.runner) if isinstance(executor, UniprocExecutor) else []
        hand_over(nodes[0], nodes[1], edges, oracle)
        assert nodes[1].core.stats().prompt_tokens_computed == 0
    if not drafts:
        return
    firsts = {len(prompt) + 2 for prompt in edges.values()}
    behind = [one for one in found if len(one[0]) in firsts]
    assert len(behind) >= len(edges), "the first step of each answer"
    drafter = v4_mtp_reference(reference(long), long)
    for known, proposed, count in (*behind, *found[::9]):
        assert proposed[:count] == drafter.drafts(known, count), len(known)


def test_stages_hand_over_their_windows_and_rows(long: Path, oracle: GreedyAnswers) -> None:
    """Two stages, whose rows of 128 tokens have blocks of their own, to a node of one, where they
    lie in those of others. What goes from stage to stage are all four residual streams."""
    edges = {name: asked()[name] for name in ("3", "129")}
    model = load_model_config(long)
    roles: tuple[KVRole, KVRole] = "kv_producer", "kv_consumer"
    with ExitStack() as stack:
        nodes = []
        for stages, role in zip((2, 1), roles, strict=True):
            config = stage_config(stages, role=role, block_size=64, num_blocks=1000)
            nodes.append(stack.enter_context(running(replace(config, model=model))))
        hand_over(nodes[0], nodes[1], edges, oracle)
        assert nodes[1].core.stats().prompt_tokens_computed == 0


def test_bfloat16_is_as_exact_as_transformers(tmp_path: Path) -> None:
    """Compares with float32 on the same rounded weights; transformers in bfloat16 is the yardstick.
    All rows are seen: near scores would be chosen otherwise by either."""
    family = Family(LONG.model, LONG.config, LONG.changes | {"index_topk": 96})
    save_checkpoint(family, tmp_path, torch.bfloat16)
    exact, theirs = reference(tmp_path), reference(tmp_path, torch.bfloat16)
    paged = make_paged_model(tmp_path, ParallelGroup(0, 1))
    prompt = asked()["255"]
    truth = reference_logits(exact, prompt)
    (ours,) = paged.prefill([prompt], 100)
    errors = [float((x.float() - truth).norm() / truth.norm())
              for x in (ours, reference_logits(theirs, prompt))]  # fmt: skip
    assert errors[0] < 1.5 * errors[1] < 0.15


def published_name(name: str) -> str:
    """Returns what DeepSeek calls a tensor that transformers writes."""
    for ours, theirs in (
        ("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", ""),
        (".attn.norm.", ".attn.kv_norm."),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def by_modelopt(num_layers: int) -> dict[str, Any]:
    """Returns what ModelOpt adds to the quantisation of a checkpoint with experts in NVFP4."""
    return {
        "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16,
        "kv_cache_quant_algo": None, "producer": {"name": "modelopt", "version": "0.47.0"},
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
        "quantized_layers": {
            f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}
            for i in range(num_layers)
        },
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    }  # fmt: skip


def write_published(folder: Path, published: Path, plain: Path, *, nvfp4: bool) -> None:
    """Writes a checkpoint of transformers as DeepSeek publishes it, or NVIDIA, and one in plain
    numbers that mean the same."""
    in_fp8 = ("wq_a", "wkv", "wq_b", "wo_a", "wo_b", "e_proj", "h_proj")
    fp8, fp4 = write_fp8_blocks((128, 128), "scale"), {True: write_nvfp4(), False: write_mxfp4()}
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, own = name.removesuffix(".weight"), published_name(name)
        last = layer.rpartition(".")[2]
        meant[name], stored[own] = tensor, tensor
        if ".ffn.experts." in name:
            # NVIDIA leaves the layer that predicts ahead as it is.
            by_nvidia = nvfp4 and not name.startswith("mtp.")
            found, meant[name] = fp4[by_nvidia](own.removesuffix(".weight"), tensor)
            stored |= found
            if not by_nvidia:
                stored[own] = found[own].view(torch.int8)
                exponents = stored.pop(own.replace(".weight", ".weight_scale"))
                stored[own.replace(".weight", ".scale")] = exponents.view(torch.float8_e8m0fnu)
        elif ".shared_experts." in name or (last in in_fp8 and ".compressor." not in name):
            found, _ = fp8("x", tensor)
            # Scales are powers of two, which e8m0 holds.
            power = found["x.scale"].log2().ceil().exp2()
            wide = power.repeat_interleave(128, 0).repeat_interleave(128, 1)
            wide = wide[: tensor.shape[0], : tensor.shape[1]]
            stored[own] = to_e4m3(tensor / wide)
            meant[name] = stored[own].float() * wide
            stored[own.replace(".weight", ".scale")] = power.to(torch.float8_e8m0fnu)
    for to, tensors in ((published, stored), (plain, meant)):
        shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: t.contiguous() for name, t in tensors.items()}, to / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]["compress"]
    scaling = {"type": "yarn"} | {
        name: rope[name]
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        if name in rope
    }
    ratios = {"sliding_attention": 0, **config["compress_rates"]}
    config |= {
        "compress_ratios": [*(ratios[kind] for kind in config["layer_types"]), 0],
        "num_hash_layers": config["mlp_layer_types"].count("hash_moe"),
        "rope_scaling": scaling, "compress_rope_theta": rope["rope_theta"],
        "expert_dtype": "fp4", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
            **(by_modelopt(config["num_hidden_layers"]) if nvfp4 else {}),
        },
    }  # fmt: skip
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "partial_rotary_factor"):
        del config[name]
    (published / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("nvfp4", [False, True])
def test_a_checkpoint_as_published(nvfp4: bool, tmp_path: Path) -> None:
    """Experts in FP4 inside of FP8, by DeepSeek or by NVIDIA, exponents as scales, names and
    settings of DeepSeek's own, also of the layer that predicts ahead."""
    family = Family(LONG.model, LONG.config, LONG.changes | {"moe_intermediate_size": 32})
    saved, published, plain = (tmp_path / name for name in ("saved", "published", "plain"))
    write_v4_with_mtp(saved, family)
    write_published(saved, published, plain, nvfp4=nvfp4)
    prompts = [asked()["3"], asked()["255"]]
    paged, model = make_paged_model(published, ParallelGroup(0, 1)), reference(plain)
    for prompt, ours in zip(prompts, paged.prefill(prompts, 100), strict=True):
        torch.testing.assert_close(ours, reference_logits(model, prompt), rtol=1e-4, atol=4e-5)
    found = []
    for folder in (published, plain):
        engine = OneEngine(with_drafter(drafting_config(folder), "mtp", folder), depth=1)
        found.append(watch(engine.worker.runner))
        greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        engine.add(EngineCoreRequest(request_id="r", spec=RequestSpec(asked()["3"], greedy)))
        engine.finish()
        engine.worker.shutdown()
    assert found[0] == found[1] and len(found[0]) > 5


FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 129280,
    "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
    "o_groups": 8, "o_lora_rank": 1024, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True, "topk_method": "noaux_tc", "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0, "num_hash_layers": 3, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "sliding_window": 128, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000.0, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576, "num_nextn_predict_layers": 1, "expert_dtype": "fp4",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip
"""V4-Flash's config.json."""


def flash(folder: Path, **changes: Any) -> Path:
    values = {name: value for name, value in (FLASH | changes).items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_bytes_of_a_token_are_those_of_its_rows(tmp_path: Path) -> None:
    """V4-Flash keeps 1,024 bytes of a row, and a key of 132 of one that is chosen: in long contexts
    a token takes 6.2 kB over all layers, and 6.4 with what pages leave unused."""
    model = load_model_config(flash(tmp_path / "flash"), load_format="dummy")
    layout = EngineConfig(engine_id="flash", epoch=1, model=model).kv_layout
    rows = [group for group in layout.groups if group.compress_ratio > 1]
    assert [(group.compress_ratio, len(group.layers)) for group in rows] == [(4, 21), (128, 20)]
    implied = 21 * (1024 + 132) / 4 + 20 * 1024 / 128
    used = blocks_a_token(layout.groups) * layout.block_bytes
    assert implied == pytest.approx(6229)
    assert implied < used < 1.021 * implied


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"o_groups": 7}, "o_groups"),
        ({"o_lora_rank": None}, "o_lora_rank"),
        ({"head_dim": 192}, "head_dim"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"compress_ratios": [0, 4]}, "compress_ratios"),
        ({"compress_ratios": [8] * 44}, "compress_ratios"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"compress_rates": {"compressed_sparse_attention": 3}}, "compress_rates"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types"),
        ({"expert_dtype": "fp3"}, "expert_dtype"),
        ({"hc_mult": 3}, "hc_mult"),
        (
            {
                "rope_scaling": None,
                "rope_parameters": {
                    "main": {"rope_type": "yarn", "factor": 4.0}, "compress": {"rope_theta": 1e4},
                },
            },
            "rope_parameters",
        ),
    ],
)  # fmt: skip
def test_what_is_not_here_is_refused_by_name(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=name):
        load_model_config(flash(tmp_path / "flash", **changes), load_format="dummy")


def test_ranks_share_groups_of_the_output(tmp_path: Path) -> None:
    model = load_model_config(flash(tmp_path / "flash"), load_format="dummy")
    check_parallel(model, ParallelConfig(tensor_parallel_size=8))
    with pytest.raises(CheckpointError, match="8 groups of the attention's output"):
        check_parallel(model, ParallelConfig(tensor_parallel_size=16))


def test_drafters_that_read_one_stream_are_refused(long: Path) -> None:
    model = load_model_config(long)
    with pytest.raises(CheckpointError, match="several residual streams"):
        read_draft("eagle3", str(long), model)


def test_dspark_is_refused_by_name(tmp_path: Path) -> None:
    """V4-Flash-0731 has it under the names of the layer that predicts ahead."""
    folder = flash(tmp_path / "flash")
    save_file({"mtp.0.main_proj.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="DSpark"):
        read_draft("mtp", str(folder), load_model_config(folder, hashes_later=True))


def test_v41_is_refused_by_what_it_has_besides(tmp_path: Path) -> None:
    names = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
    with pytest.raises(CheckpointError) as refused:
        load_model_config(flash(tmp_path / "v41", **names), load_format="dummy")
    for lacking in ("n-gram memory", "rows of one token or two in FP4", "index of two levels",
                    "one block ahead", "32 x 32", "DSpark", "DeepseekV4ForCausalLM"):  # fmt: skip
        assert lacking in str(refused.value)
