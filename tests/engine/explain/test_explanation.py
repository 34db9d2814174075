"""`tandem explain` answers what models ask for, and what launchers choose."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.engine.models.shapes import SHAPES, shape_config
from engine.batch.input_batch import BatchOrder, InputBatch
from engine.config import CacheConfig, DeviceConfig, EngineConfig, QuantizationName
from engine.explain.__main__ import main
from engine.explain.explanation import Batch, Explanation, KernelChoice, explain, is_telling
from engine.explain.reasons import OF_STATES, RULES
from engine.explain.report import report, summary, tables_of
from engine.layers.attention.whole_prompts import flash_attention
from engine.layers.gemm_policy import GemmPolicy
from engine.models.base import ForwardInputs
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.worker.attention_of_model import attention_of, group_inputs
from engine.worker.memory.kv_cache import layer_views
from kv_transfer.layout import own_groups
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.device import KNOWN_GPUS, GpuFacts, as_on, gpu_name, supports_pdl
from tandem_kernels.experts.expert_tuning import ExpertShape, gemm_tunings
from tests.engine.tiny_model import place_alone

CPU = torch.device("cpu")
H200 = KNOWN_GPUS["h200"]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 160,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[dict[str, Any], QuantizationName | None]] = {
    "llama-3.1-8b": ({}, None),
    "qwen3-30b-a3b": (EXPERTS, "fp8"),
    "gpt-oss-120b": ({"num_local_experts": 4, "num_experts_per_tok": 2}, None),
    "deepseek-v2-lite": (
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        None,
    ),
}


def config_of(
    folder: Path, shape: str, *, small: bool = False, device: str = "cuda", **settings: Any
) -> EngineConfig:
    changes, quantization = FAMILIES[shape]
    few = SMALL | changes if small else {"num_hidden_layers": 4, "max_position_embeddings": 16384}
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | few))
    model = load_model_config(
        folder,
        load_format="dummy",
        quantization=quantization,
        dtype="float32" if small else "auto",
        hashes_later=True,
    )
    own = DeviceConfig(device="cpu" if device == "cpu" else "cuda", **settings)
    return EngineConfig(
        engine_id="explained", epoch=1, model=model, device=own, cache=CacheConfig(block_size=16)
    )


def rows_of(found: Explanation, layer: int) -> list[KernelChoice]:
    return [row for layers, rows in found.choices if layer in layers for row in rows]


def the_row(found: Explanation, layer: int, part: str) -> KernelChoice:
    (row,) = [row for row in rows_of(found, layer) if row.part == part]
    return row


def launched(config: EngineConfig, batch: Batch) -> list[str]:
    """Computes a batch on CPU, and returns the operations that ran, as they ran."""
    ran: list[str] = []

    def recorder(op: ops.Op[..., Any]) -> Callable[..., Any]:
        meaning = op.reference

        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(meaning.__name__)
            return meaning(*args, **kwargs)

        return run

    model = create_model(config, place_alone(config.model), CPU)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter.data, 0.01)
    lengths = [1] * batch.num_decodes + [*batch.prompts]
    contexts = [batch.context] * batch.num_decodes + [*batch.prompts]
    queries, seen = np.array(lengths, dtype=np.int32), np.array(contexts, dtype=np.int32)
    count, total = len(lengths), sum(lengths)
    order = BatchOrder(np.arange(count, dtype=np.int32), queries, seen, batch.num_decodes, count)
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    blocks = torch.zeros((count, 32), dtype=torch.int32)
    of_tokens = torch.zeros(total, dtype=torch.int64)
    ids = torch.zeros(total, dtype=torch.int32)
    rows, lens = torch.arange(count, dtype=torch.int32), torch.from_numpy(seen)
    built = InputBatch(order, total, rows, starts, ids, of_tokens, of_tokens, lens, blocks)
    layout = config.kv_layout
    pages = torch.zeros(layout.block_bytes * 2, dtype=torch.uint8)
    attention = attention_of(config, CPU, 0)
    groups = [replace(built, window=group.window) for group in own_groups(layout.groups)]
    with ops.standing_in(recorder), torch.inference_mode():
        hidden = model(
            ForwardInputs(
                ids,
                of_tokens,
                group_inputs(layout.groups, groups, attention),
                layer_views(pages, layout),
                attention,
                lambda layer: None,
            )
        )
        model.compute_logits(hidden[:count])
    return ran


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("batch", [Batch(3, 40), Batch(prompts=(24,))], ids=str)
def test_cpu_runs_what_is_explained(tmp_path: Path, shape: str, batch: Batch) -> None:
    config = config_of(tmp_path, shape, small=True, device="cpu")
    ran = launched(config, batch)
    (found,) = explain(config, None, [batch])
    told = [row.operation for layer in range(3) for row in rows_of(found, layer)]
    ours = [name for name in told if name in {op.reference.__name__ for op in ops.Op.all}]
    assert ours
    assert ours == [name for name in ran if name in set(ours)]


def test_help_and_steps_are_said_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "\n    tandem explain FOLDER --device cpu" in capsys.readouterr().out
    assert [str(Batch(n, context=8)) for n in (1, 2)] == [
        "1 decode of 8 tokens",
        "2 decodes of 8 tokens",
    ]


def test_gpt_oss_at_16_requests(tmp_path: Path) -> None:
    """The question that took nine files."""
    config = config_of(tmp_path, "gpt-oss-120b")
    (found,) = explain(config, H200, [Batch(16)])
    windowed, whole = (the_row(found, layer, "attention") for layer in (0, 1))
    assert windowed.kernel == "window_attention_kernel"
    assert windowed.tile == "the window of 128 at once, 16 x 8"
    assert whole.kernel == "decode_attention_kernel"
    assert whole.tile == "tile 64, warps 4, stages 5, programs_per_sm 3"
    assert found.graph == "of 16 decodes"


def test_decodes_are_explained_as_their_graph_runs_them(tmp_path: Path) -> None:
    """Five requests are eight rows, which other kernels compute; without graphs they are five."""
    config = config_of(tmp_path, "gpt-oss-120b")
    five, eight = explain(config, H200, [Batch(5), Batch(8)])
    assert five.graph == eight.graph == "of 8 decodes"
    assert five.choices == eight.choices and five.step != eight.step
    config = replace(config, device=replace(config.device, enforce_eager=True))
    five, eight = explain(config, H200, [Batch(5), Batch(8)])
    assert five.graph.startswith("none") and five.choices != eight.choices


def test_a_step_with_a_chunk_beside_answers_says_which_graph_it_is(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama-3.1-8b")
    batches = [Batch(8, 12_000, (64,)), Batch(8, 1000, (2000,))]
    near, far = explain(config, H200, batches)
    assert near.graph == "of 128 tokens with prompts of 64 requests"
    assert far.graph == "none: 2008 tokens with prompts, recorded up to 1024"


def test_a_step_that_no_graph_holds_is_explained_as_the_two_that_run() -> None:
    """No graph with prompts holds the kernels for what an indexer chooses of long contexts."""
    config = shape_config("deepseek-v3.2-6-layers", num_layers=4)
    steps = Batch(8, 12_000, (64,)), Batch(8, 12_000, (2100,)), Batch(8, 12_000), Batch(0, 1, (64,))
    first, second, whole, decodes, prompt = explain(config, H200, steps)
    assert first.graph == f"{decodes.graph}, the first of two" == "of 8 decodes, the first of two"
    assert second.graph == f"{prompt.graph}, the second of two"
    assert (first.step, first.choices) == (decodes.step, decodes.choices)
    assert (second.step, second.choices) == (prompt.step, prompt.choices)
    assert whole.graph.startswith("none: ")


@pytest.mark.parametrize("rows", [1, 16, 17, 65])
def test_gemms_change_at_the_policy_thresholds(tmp_path: Path, rows: int) -> None:
    config = config_of(tmp_path, "llama-3.1-8b")
    (found,) = explain(config, H200, [Batch(rows)])
    with as_on(H200):
        policy = GemmPolicy.choose(config.device, CPU, 1)
    heads, small = rows <= policy.small_m_heads, rows <= policy.small_m_rows
    qkv = the_row(found, 0, "self_attn.qkv_proj")
    assert qkv.operation == ("small_m_qkv" if heads else "library")
    assert str(policy.small_m_heads if heads else policy.small_m_rows) in qkv.why
    assert the_row(found, 0, "mlp.gate_up_proj").operation == (
        "small_m_gate_up" if small else "library"
    )


def test_a_fast_path_that_is_disabled_is_not_explained(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama-3.1-8b", disabled_fast_paths=("small-m-gemm",))
    (found,) = explain(config, H200, [Batch(1)])
    assert the_row(found, 0, "self_attn.qkv_proj").operation != "small_m_gemm"


@pytest.mark.parametrize("tokens", [64, 1000])
def test_experts_have_the_tiles_of_their_table(tmp_path: Path, tokens: int) -> None:
    config = config_of(tmp_path, "qwen3-30b-a3b")
    (found,) = explain(config, H200, [Batch(prompts=(tokens,))])
    row = the_row(found, 0, "mlp.experts")
    assert row.operation == "fp8_experts"
    first, second = gemm_tunings(ExpertShape(128, 768, 2048, "fp8"), 8 * tokens, H200.name)
    for tuning in (first, second):
        assert f"{tuning.rows} x {tuning.cols} x {tuning.depth}" in row.tile
    assert "table NVIDIA_H200/E128-N768-K2048-fp8" in row.tile


L40S = GpuFacts("NVIDIA_L40S", (8, 9), 142, shared_bytes=99 * 1024)


def test_experts_have_as_few_stages_as_shared_memory_has_room_for(tmp_path: Path) -> None:
    """An L40S has 99 KiB of the 227 with which the table was measured."""
    config = config_of(tmp_path, "qwen3-30b-a3b")
    stages = []
    for gpu in (H200, L40S):
        (found,) = explain(config, gpu, [Batch(prompts=(1000,))])
        first, second = the_row(found, 0, "mlp.experts").tile.split("; ")[:2]
        stages.append([int(tile.rpartition(" ")[2]) for tile in (first, second)])
    shape = ExpertShape(128, 768, 2048, "fp8")
    both = gemm_tunings(shape, 1000 * 8, H200.name)
    assert stages[0] == [tuning.num_stages for tuning in both]
    within = (tuning.within(99 * 1024, n, 1) for tuning, n in zip(both, (2, 1), strict=True))
    assert stages[1] == [tuning.num_stages for tuning in within] < stages[0]


@pytest.mark.parametrize(("decodes", "kernel"), [(1, "one_row_expert"), (3, "fused_experts")])
def test_a_shared_expert_beside_others_is_told_with_its_width(
    tmp_path: Path, decodes: int, kernel: str
) -> None:
    (found,) = explain(config_of(tmp_path, "deepseek-v2-lite"), H200, [Batch(decodes)])
    row = the_row(found, 1, "mlp.experts")
    assert row.kernel.startswith(kernel)
    assert row.tile.endswith("a shared expert of width 2816 in the first programs")


def test_rows_of_tables_are_said_with_what_they_ask_for(tmp_path: Path) -> None:
    """On a GPU without tables of its own, those of Hopper."""
    config = config_of(tmp_path, "llama-3.1-8b")
    for gpu in (H200, L40S):
        (found,) = explain(config, gpu, [Batch(8)])
        row = the_row(found, 0, "attention")
        assert row.tables == ("sm_90/decode_attention row 12: num_units <= 128",)
        assert row.tables[0] in report([found]) and found.thresholds == "sm_90/gemm_thresholds"
        assert tables_of([found]) == ["sm_90"]


def test_long_prompts_in_fp8_need_no_table(tmp_path: Path) -> None:
    (found,) = explain(config_of(tmp_path, "qwen3-30b-a3b"), H200, [Batch(prompts=(8192,))])
    row = the_row(found, 0, "mlp.experts")
    assert row.kernel == "fp8_experts_ahead_kernel" and row.tile.startswith("at most 128 rows")


def test_h100_takes_the_tables_of_h200_and_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3-30b-a3b")
    (found,) = explain(config, KNOWN_GPUS["h100"], [Batch(16)])
    assert "table NVIDIA_H200/" in the_row(found, 0, "mlp.experts").tile


def test_latent_attention_is_expanded_for_long_prompts(tmp_path: Path) -> None:
    config = config_of(tmp_path, "deepseek-v2-lite")
    steps = [Batch(8), Batch(prompts=(8192,))]
    decodes, prompt = explain(config, H200, steps)
    assert "latent_attention" in {row.operation for row in rows_of(decodes, 1)}
    assert "FlashAttention 3" in {row.operation for row in rows_of(prompt, 1)}
    (_, without) = explain(config, H200, steps, has_flash=False)
    assert "ragged_attention" in {row.operation for row in rows_of(without, 1)}


def test_chosen_tokens_of_short_contexts_are_attended_behind_a_mask() -> None:
    config = shape_config("deepseek-v3.2-6-layers")
    (prompt,) = explain(config, H200, [Batch(prompts=(8192,))])
    operations = {row.operation for row in rows_of(prompt, 1)}
    assert {"index_topk", "chosen_bits", "ragged_attention"} <= operations
    assert "sparse_latent_attention" not in operations


def test_ranks_choose_for_some_of_the_tokens_of_a_prompt() -> None:
    config = shape_config("deepseek-v3.2-6-layers", num_layers=1, tensor_parallel_size=8)
    steps = [Batch(prompts=(8192,)), Batch(8, 8192)]
    found = [rows_of(step, 0) for step in explain(config, H200, steps)]
    reasons = [row.why for rows in found for row in rows if row.operation == "index_topk"]
    assert [
        f"that {count} tokens see" in why for count, why in zip((1024, 8), reasons, strict=True)
    ]


def test_without_flash_attention_cudnn_attends_long_prompts(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama-3.1-8b")
    steps = [Batch(prompts=(4096,))]
    (with_flash,), (without,) = (
        explain(config, H200, steps, has_flash=has_flash) for has_flash in (True, False)
    )
    assert the_row(with_flash, 0, "attention").operation == "FlashAttention 3"
    assert the_row(without, 0, "attention").operation == "cuDNN"


@pytest.mark.parametrize("package", ["fa3_fwd_interface", "flash_attn_interface"])
def test_what_is_installed_here_says_nothing_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Kernels of the package could not run on tensors without memory."""
    assert not flash_attention.attends_prompts()
    (tmp_path / f"{package}.py").write_text("raise AssertionError('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attention.attends_prompts()
    config = config_of(tmp_path, "llama-3.1-8b")
    for has_flash, operation in ((True, "FlashAttention 3"), (False, "cuDNN")):
        (found,) = explain(config, H200, [Batch(prompts=(4096,))], has_flash=has_flash)
        assert the_row(found, 0, "attention").operation == operation


def test_deterministic_mode_has_one_kernel_for_all(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama-3.1-8b", deterministic=True)
    for found in explain(config, H200, [Batch(16), Batch(prompts=(4096,))]):
        assert {row.operation for row in rows_of(found, 0)} == {"invariant_gemm", "paged_attention"}
        assert the_row(found, 0, "attention").kernel == "prefill_attention_kernel"


@pytest.mark.parametrize("window", [None, 16, 128, 200, 4096])
@pytest.mark.parametrize("fixed_order", [False, True])
def test_decodes_are_launched_as_the_rule_says(
    monkeypatch: pytest.MonkeyPatch, window: int | None, fixed_order: bool
) -> None:
    from tandem_kernels.attention import paged_attention

    ran = []
    for kind in ("window", "decode", "prefill"):
        monkeypatch.setattr(
            paged_attention, f"{kind}_attention", lambda *_, k=kind, **__: ran.append(k)
        )
    lens = torch.full((4,), 50, dtype=torch.int32)
    metadata = AttentionMetadata(
        torch.zeros((4, 8), dtype=torch.int32),
        torch.arange(5, dtype=torch.int32),
        lens,
        num_decodes=4,
        max_query_len=1,
        max_seq_len=50,
        window=window,
        fixed_order=fixed_order,
    )
    q = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
    kv_cache = torch.zeros(2, 2, 2, 16, 128, dtype=torch.bfloat16)
    paged_attention.paged_attention(q, kv_cache, metadata, 1.0)
    assert ran == [paged_attention.kernel_of_decode(q, kv_cache, metadata)]


def test_every_choice_has_a_reason() -> None:
    """An operation of a new kernel says why it runs, or counts among those that are no choice."""
    known = {*RULES, *OF_STATES, "paged_attention"}
    names = {
        op.reference.__name__ for op in ops.Op.all if is_telling(op.__name__, op.kernel_module)
    }
    assert names <= known, names - known


@pytest.mark.parametrize(
    ("shape", "decodes", "kernels"),
    [
        ("deepseek-v4-flash-3-layers", 1, {"window_rows_kernel": "rows 16, tile 16"}),
        ("deepseek-v4-flash-3-layers", 16, {"window_rows_kernel": "rows 64, tile 32"}),
        ("deepseek-v4-flash-3-layers", 64, {"window_rows_kernel": "rows 64, tile 64"}),
        (
            "deepseek-v4-flash-3-layers",
            4096,
            {
                "window_rows_ahead_kernel": "rows 64, tile 64",
                "fp4_experts_ahead_kernel": "at most 128 rows",
            },
        ),
        ("deepseek-v3.2-6-layers", 16, {"sparse_pieces_kernel": "rows 64, tile 128"}),
        ("minimax-m3-4-layers", 16, {"block_sparse_kernel": "tile 64"}),
        ("nemotron-3-nano", 16, {"mamba_scan_kernel": "values 32, warps 2"}),
        ("nemotron-3-nano", 64, {"mamba_scan_kernel": "values 64, warps 4"}),
        ("qwen3-next-80b-a3b", 16, {"delta_rule_kernel": "values 32, warps 1"}),
        ("qwen3-next-80b-a3b", 64, {"delta_rule_kernel": "values 64, warps 2"}),
        ("deepseek-v3.2-6-layers", 1, {"index_scores_ahead_kernel, select kernels": ""}),
    ],
)
def test_attention_that_is_sparse_and_states_say_how_they_run(
    shape: str, decodes: int, kernels: dict[str, str]
) -> None:
    (found,) = explain(shape_config(shape), H200, [Batch(decodes)])
    rows = [row for _, rows in found.choices for row in rows]
    assert all(row.why for row in rows)
    for kernel, tile in kernels.items():
        assert any(row.kernel == kernel and row.tile.startswith(tile) for row in rows)


def test_assumed_gpus_end_with_their_context() -> None:
    with as_on(H200):
        assert gpu_name(CPU) == "NVIDIA_H200" and supports_pdl(CPU)
    assert gpu_name(CPU) == "cpu" and not supports_pdl(CPU)


def test_the_command_reads_config_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path, "llama-3.1-8b")
    asked = ["--model", str(tmp_path), "--device", "h200", "--batch", "16", "--tokens", "2048"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "16 decodes of 1024 tokens" in told and "small_m_gemm_kernel" in told
    assert main([*asked, "--json"]) == 0
    by_option = capsys.readouterr().out
    assert json.loads(by_option)[0]["graph"] == "of 16 decodes"
    assert main([*asked[1:], "--json"]) == 0
    assert capsys.readouterr().out == by_option
    for wrong in (["--device", "h200"], [str(tmp_path), *asked]):
        with pytest.raises(SystemExit):
            main(wrong)
    assert main(["--model", str(tmp_path), "--device", "h200", "--tensor-parallel-size", "7"]) == 1
    assert "tandem explain: " in capsys.readouterr().err


def test_a_start_is_told_in_a_line_for_each_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gpt-oss-120b")
    found = explain(config, H200, [Batch(1), Batch(prompts=(2048,))])
    lines = summary(found)
    assert len(lines) == 2 and "FlashAttention 3" in lines[1]
    assert "layers 0, 2 (2 of 4)" in report(found)
