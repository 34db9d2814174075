"""Compile every kernel for GPUs that are not there; run as a program with no interpreter set.

`python compile_kernels.py 80 90` prints one line a kernel, `capability | name | shared bytes`, and
fails with the compiler's message. The arguments' types are those that the launchers pass. What
makes the compiler take another way gets a case of its own, once: each kernel in bfloat16, and on
Hopper attention for each kind of head size (whole tiles, padded ones, and those that need smaller
tiles), the small ones in float16 as well; block sizes and other switches vary at one head size.
Triton keeps what it has compiled, by the content of sources and compiler: where this ran before,
only what has changed since is compiled.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from registers_in_flight import faults_of, multiplies_from_registers, one_by_one
from rounds_of_loads import rounds_of_loads
from stack_bytes import stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from host.termination import die_with_parent
from tandem_kernels.attention import (
    attended_rows,
    attention_sink,
    block_scores,
    block_sparse_attention,
    chosen_bits,
    chosen_slots,
    close_rows,
    context_gather,
    decode_attention,
    decode_join,
    decode_merge,
    decode_tuning,
    index_candidates,
    index_rope_and_cache,
    index_rows,
    index_scores_ahead,
    index_select,
    index_topk,
    latent_attention,
    latent_decode,
    latent_decode_ahead,
    latent_decode_few,
    latent_gather,
    latent_merge,
    latent_rope_and_cache,
    merge_attention,
    prefill_attention,
    prefill_tuning,
    ragged_attention,
    rope_and_cache,
    row_cache,
    shared_rope_and_cache,
    sparse_latent_attention,
    sparse_latents_ahead,
    sparse_latents_pieces,
    window_attention,
    window_rows_ahead,
    window_rows_attention,
)
from tandem_kernels.batch import batch_prep, block_copies, closed_slots, ngrams, word_pieces
from tandem_kernels.checksums import xxh3
from tandem_kernels.collectives import (
    peer_exchange,
    peer_memory,
    peer_reduce,
    peer_reduce_norm,
)
from tandem_kernels.device import GpuFacts, as_on, has_ample_memory
from tandem_kernels.elementwise import (
    add_normed,
    block_mix,
    embedding,
    enter_streams,
    mix_many,
    relu_squared,
    rms_norm,
    row_gate,
    sigmoid_and_mul,
    silu_and_mul,
    streams,
)
from tandem_kernels.experts import (
    expert_rows,
    expert_sums,
    expert_tuning,
    fused_experts,
    int4_experts,
    int8_experts,
    normed_router,
    one_row_experts,
    route_tokens,
    router_shapes,
)
from tandem_kernels.experts.fp4 import even_runs, expert_tiles, experts_ahead
from tandem_kernels.experts.fp4 import experts as fp4_experts
from tandem_kernels.experts.fp4 import pairs as fp4_pairs
from tandem_kernels.experts.fp4.few_rows import experts as fp4_few_rows
from tandem_kernels.experts.fp4.few_rows.shapes import expert_warp_tuning
from tandem_kernels.experts.fp4.one_row import experts as fp4_one_row
from tandem_kernels.experts.fp4.one_row.shapes import one_row_tuning
from tandem_kernels.experts.fp8 import experts as fp8_experts
from tandem_kernels.experts.fp8 import experts_ahead as fp8_experts_ahead
from tandem_kernels.experts.fp8 import pairs as fp8_pairs
from tandem_kernels.experts.fp8 import sorted_rows
from tandem_kernels.gemm import (
    few_row_gemm,
    few_row_qkv,
    few_row_warp_shapes,
    few_row_warps,
    fp4_dequantise,
    fp4_gemm,
    fp4_tuning,
    fp8_activations,
    fp8_dequantise,
    fp8_few_rows,
    fp8_gemm,
    fp8_tuning,
    fused_gate_up,
    fused_qkv,
    fused_tuning,
    gemm_thresholds,
    head_gemm,
    int4_dequantise,
    int4_gemm,
    int4_tuning,
    int8_gemm,
    int8_weights,
    invariant_gemm,
    small_m_gemm,
    small_m_qkv,
)
from tandem_kernels.linear_attention import (
    causal_conv,
    chunk_systems,
    chunk_walk,
    delta_chunks,
    delta_rule,
    delta_tuning,
    few_row_conv,
    gated_group_norm,
    gated_rms_norm,
    kda_chunks,
    kda_parts,
    kda_systems,
    mamba_chunks,
    mamba_scan,
    mamba_tuning,
)
from tandem_kernels.lora import (
    lora_expand,
    lora_expand_few,
    lora_gemm,
    lora_gemm_tuning,
    lora_lanes,
    lora_shrink,
    lora_slots,
)
from tandem_kernels.sampler import (
    filter_floor,
    logprobs,
    parameters,
    penalties,
    sampling,
    token_masks,
)

CPU = torch.device("cpu")
"""Takes the general tables of tunings."""
MULTIPLES = (
    "_stride",
    "vocab_size",
    "num_outputs",
    "inner",
    "width",
    "num_numbers",
    "_words",
    "part",
    "most",
    "_bytes",
    "slots_at",
)
"""How sizes are called that are multiples of 16 in all models that matter, where kernels may be
compiled for that."""
NO_SCALES = {"k_scale": None, "v_scale": None}
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
STACK_BYTES = 1536
"""Memory of a thread beside its registers. The walk of the delta rule once had 18 kB, and took 20
times as long as it does without."""
LONGEST_S = 600
"""A case that takes longer hangs, on a slow machine that does much else as well: alone, the longest
takes ten seconds."""
TURN_BYTES = 2
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HEAD_SIZES = {
    80: ((64, 64), (128, 128)),
    90: ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512)),
}
"""Widths of keys and values by capability. Above 64 all up to 128 are padded to 128, as 80 is; 128
takes the most shared memory."""


@dataclass
class Case:
    """`types` names the type of some parameters; others are int32, upper case is constexpr."""

    kernel: Any
    label: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    most_shared: int = 0
    """Bytes of shared memory; 0: as many as the capability's data centre GPU has."""

    def __post_init__(self) -> None:
        # Who made them may change them for the next case.
        self.types, self.constants = dict(self.types), dict(self.constants)

    def source(self) -> ASTSource:
        signature = {}
        for name in self.kernel.arg_names:
            constant = name in self.constants
            signature[name] = "constexpr" if constant else self.types.get(name, "i32")
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, ((name, kind), known) in enumerate(
                zip(signature.items(), self.kernel.params, strict=True)
            )
            if (kind.startswith("*") or (kind == "i32" and name.endswith(MULTIPLES)))
            and not (known.do_not_specialize or known.do_not_specialize_on_alignment)
        }
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, signature, self.constants, aligned)


NO_PARTS = {"IN_PARTS": False, "partial_acc": None, "partial_state": None, "arrived": None}
"""Constants of attention over whole contexts."""

ASK_AT_ONCE = {
    expert_sums.sum_pairs_kernel: 1,
    expert_sums.pairs_add_rms_norm_kernel: 2,
    head_gemm.head_gemm_kernel: 2,
    decode_merge.merge_kernel: 1,
}
"""Wait for memory so often at most, once for each round of vectors: small kernels of a step with
few rows, of which that is most of the time."""
BEGIN_LATE = (
    rms_norm.rms_norm_kernel,
    add_normed.add_normed_kernel,
    route_tokens.route_tokens_kernel,
    normed_router.normed_router_kernel,
    expert_sums.pairs_add_rms_norm_kernel,
)
"""Let the next kernel begin when the ones in front have ended, and no sooner."""


def check_registers(case: Case, ptx: str, cubin: bytes) -> None:
    """Products in flight keep the registers that they read, and kernels that say themselves when
    products begin do not wait for each."""
    faults = faults_of(cubin) if multiplies_from_registers(ptx) else []
    if isinstance(case.kernel, GluonJITFunction):
        faults += one_by_one(cubin)
    assert not faults, (case.kernel.__name__, case.label, faults[:3])


def check_spills(case: Case, cubin: bytes) -> None:
    """Threads have what they compute in registers, but for little."""
    found = stack_bytes(cubin)
    assert found <= STACK_BYTES, (case.kernel.__name__, case.label, found)


def check_order(case: Case, ptx: str) -> None:
    """Kernels that must be late wait before they let the next one begin."""
    if case.constants.get("OVERLAP") and case.kernel in BEGIN_LATE:
        begins, waits = (ptx.index(f"griddepcontrol.{end}") for end in ("launch_dep", "wait"))
        assert waits < begins, (case.kernel.__name__, case.label)


def check_rounds(case: Case, cubin: bytes) -> None:
    """Small kernels ask for what they need at once."""
    most = ASK_AT_ONCE.get(case.kernel)
    if most is not None:
        assert rounds_of_loads(cubin) <= most, (case.kernel.__name__, case.label)


def named(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


def elementwise_cases(capability: int) -> Iterator[Case]:
    for dtype in DTYPES if capability >= 90 else ("bf16",):
        pointers = named(f"*{dtype}", "x", "residual", "weight", "out")
        for fused in (False, True) if dtype == "bf16" else (True,):
            yield Case(
                rms_norm.rms_norm_kernel,
                f"{dtype} fused={fused}",
                {**pointers, "eps": "fp32"},
                {
                    "HAS_RESIDUAL": fused,
                    "BLOCK": 4096,
                    "OVERLAP": fused and capability >= 90,
                },
                {"num_warps": 8},
            )
        outs = named(f"*{dtype}", "parts", "out_1", "out_2", "out_3", "scale")
        for is_paired in (False, True):
            yield Case(
                add_normed.add_normed_kernel,
                f"{dtype} paired={is_paired}",
                {
                    **pointers,
                    **outs,
                    **named("*fp32", "dense_weight", "sparse_weight"),
                    **named("*fp32", "weight_1", "weight_2", "weight_3"),
                    **named("fp32", "dense_eps", "sparse_eps", "eps", "eps_1", "eps_2", "eps_3"),
                    "experts": "*i32",
                },
                {
                    "READERS": 1 if is_paired else 3,
                    "PAIRED": is_paired,
                    "IN_PAIRS": True,
                    "TOP_K": 8,
                    "SCALED": is_paired,
                    "BLOCK": 4096,
                    "OVERLAP": capability >= 90,
                },
                {"num_warps": 8},
            )
        yield Case(
            embedding.embedding_kernel,
            dtype,
            {**named(f"*{dtype}", "table", "out"), "token_ids": "*i32"},
            {"WIDTH": 2880, "COLS": 1024, "OVERLAP": capability >= 90},
        )
        for is_gelu in (False, True):
            yield Case(
                silu_and_mul.silu_and_mul_kernel,
                f"{dtype} gelu={is_gelu}",
                {**pointers, **named("fp32", "limit", "alpha")},
                {
                    "BLOCK": 1024,
                    "GELU": is_gelu,
                    "LIMITED": False,
                    "CLAMPED": False,
                    "CAPPED": not is_gelu,
                    "SITU": False,
                    "OVERLAP": capability >= 90,
                },
            )
        squared = {"BLOCK": relu_squared.BLOCK, "OVERLAP": capability >= 90}
        yield Case(relu_squared.relu_squared_kernel, dtype, pointers, squared)


def small_m_cases(capability: int) -> Iterator[Case]:
    shapes = itertools.product((False, True), (16, 64), (2560, 8192))
    for gated, rows, outputs in (
        shapes if capability >= 90 else ((True, 16, 8192), (False, 64, 4096))
    ):
        tuning = small_m_gemm.small_m_tuning(CPU, gated, rows, outputs, 8192)
        in_parts = tuning.splits > 1
        yield Case(
            small_m_gemm.small_m_gemm_kernel,
            f"gated={gated} rows={rows} outputs={outputs}",
            {
                **named("*bf16", "x", "weight", "bias", "out"),
                **({"parts": "*fp32", "tickets": "*i32"} if in_parts else {}),
            },
            {
                "ROWS": rows,
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "SPLITS": tuning.splits,
                **({} if in_parts else {"parts": None, "tickets": None}),
                "GATED": gated,
                "HAS_BIAS": not gated,
                "OVERLAP": capability >= 90,
                **({"bias": None} if gated else {}),
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )


def small_m_qkv_cases(capability: int) -> Iterator[Case]:
    """Yields a rank of four of Llama-3.1-70B, whose inner dimension is cut, and Llama-3.1-8B."""
    types = {
        **named("*bf16", "x", "weight", "bias", "kv_cache", "out"),
        **named("*i64", "positions", "slot_mapping"),
        **named("*fp32", "cos_sin_cache", "parts"),
        "tickets": "*i32",
    }
    shapes = itertools.product((16, 64), ((16, 2, 8192), (32, 8, 4096)))
    for rows, (num_q_heads, num_kv_heads, inner) in shapes if capability >= 90 else ():
        outputs = (num_q_heads + 2 * num_kv_heads) * 128
        tuning = small_m_gemm.small_m_tuning(CPU, False, rows, outputs, inner)
        yield Case(
            small_m_qkv.small_m_qkv_kernel,
            f"rows={rows} outputs={outputs}",
            types,
            {
                "NUM_Q_HEADS": num_q_heads,
                "NUM_KV_HEADS": num_kv_heads,
                "HALF": 64,
                "BLOCK_SIZE": 64,
                "ROWS": rows,
                "PAIRS": tuning.cols // 2,
                "DEPTH": tuning.depth,
                "SPLITS": tuning.splits,
                **({} if tuning.splits > 1 else {"parts": None, "tickets": None}),
                "HAS_BIAS": rows > 16,
                "OVERLAP": True,
                **({} if rows > 16 else {"bias": None}),
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )


def few_row_cases(capability: int) -> Iterator[Case]:
    """Yields what Hopper runs; engines on older devices leave few rows to the library."""
    if capability < 90:
        return
    for rows, outputs in ((4, 128), (1, 2880), (16, 2880)):
        is_router = outputs == 128
        inner = 2880 if is_router else 4096
        tuning = few_row_gemm.few_row_tuning(CPU, rows, outputs, inner)
        yield Case(
            few_row_gemm.few_row_gemm_kernel,
            f"rows={rows} outputs={outputs}",
            {**named("*bf16", "x", "weight", "bias"), "out": "*fp32" if is_router else "*bf16"},
            {
                "ROWS": rows,
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "INNER": inner,
                "IN_REGISTERS": rows <= gemm_thresholds.gemm_thresholds(CPU).register_rows,
                "HAS_BIAS": not is_router,
                "ADDS": outputs == 2880,
                "PRECISION": "tf32",
                "OVERLAP": True,
                **({"bias": None} if is_router else {}),
            },
            tuning.options,
        )
    for inner, outputs, cols in ((128, 512, 64), (512, 128, 16)):
        yield Case(
            head_gemm.head_gemm_kernel,
            f"inner={inner}",
            named("*bf16", "x", "weight", "out"),
            {
                "ROWS": 1 if inner == 512 else 16, "COLS": cols, "INNER": inner,
                "BLOCK_INNER": inner, "NUM_OUTPUTS": outputs, "IN_REGISTERS": inner == 512,
                "PRECISION": "tf32", "OVERLAP": True,
                "out_stride" if inner == 128 else "in_stride": 1,
            },
            {"num_warps": 4, "maxnreg": 128, "launch_pdl": True},
        )  # fmt: skip
    yield from few_row_qkv_cases()
    if capability == 90:
        yield from few_row_warp_cases()


def few_row_qkv_cases() -> Iterator[Case]:
    """Yields gpt-oss-120b's layer on one rank, and another one on four."""
    for dtype, rows, heads, inner in (
        ("bf16", 1, (64, 8, 64), 2880),
        ("fp16", 4, (8, 2, 128), 720),
    ):
        num_q_heads, num_kv_heads, head_dim = heads
        is_whole = dtype == "bf16"
        tuning = few_row_gemm.few_row_tuning(CPU, rows, (num_q_heads + 2 * num_kv_heads) * head_dim)
        yield Case(
            few_row_qkv.few_row_qkv_kernel,
            f"{dtype} rows={rows}",
            {
                **named(f"*{dtype}", "x", "norm_weight", "weight", "bias", "kv_cache", "out"),
                **named("*i64", "positions", "slot_mapping"),
                "cos_sin_cache": "*fp32",
                "eps": "fp32",
            },
            {
                "NUM_Q_HEADS": num_q_heads,
                "NUM_KV_HEADS": num_kv_heads,
                "HALF": head_dim // 2,
                "BLOCK_SIZE": 64,
                "ROWS": rows,
                "PAIRS": tuning.cols // 2,
                "DEPTH": tuning.depth,
                "INNER": inner,
                "HAS_NORM": is_whole,
                "HAS_BIAS": is_whole,
                "OVERLAP": True,
                **({} if is_whole else {"norm_weight": None, "bias": None}),
            },
            tuning.options,
        )


def few_row_warp_cases() -> Iterator[Case]:
    """Yields what Hopper alone runs: attention's layers of gpt-oss-20b, of eight rows."""
    types = {
        **named("*bf16", "x", "weight", "bias", "out", "kv_cache"),
        **named("*i64", "positions", "slot_mapping"),
        "cos_sin_cache": "*fp32",
    }
    heads = {"NUM_Q_HEADS": 64, "NUM_KV_HEADS": 8, "HALF": 32, "BLOCK_SIZE": 128}
    for kernel, outputs, inner, own in (
        (few_row_warps.few_row_warp_kernel, 2880, 4096, {"ADDS": True}),
        (few_row_warps.few_row_warp_qkv_kernel, 5120, 2880, heads),
    ):
        tuning = few_row_warp_shapes.few_row_warp_tuning(CPU, outputs, inner)
        yield Case(
            kernel,
            f"outputs={outputs}",
            types,
            {
                **own, "WARPS": tuning.warps, "AHEAD": tuning.ahead, "INNER": inner,
                "HAS_BIAS": True, "OVERLAP": True,
            },
            {"num_warps": tuning.warps, "maxnreg": tuning.registers},
        )  # fmt: skip


def fp8_cases(capability: int) -> Iterator[Case]:
    """Yields cases for Hopper alone: Ampere has no such numbers."""
    if capability < 90:
        return
    types = {
        **named("*bf16", "x", "residual", "weight", "bias", "out"),
        **named("*fp32", "x_scales", "w_scales", "scales", "partial"),
        **named("*fp32", "row_scales", "col_scales"),
        "product": "*bf16",
        **named("*fp8e4nv", "numbers"),
        "tickets": "*i32",
        "eps": "fp32",
    }
    for group in (128, 4096):
        row = {"GROUP": group, "BLOCK": 4096, "OVERLAP": True}
        options = {"num_warps": 8}
        yield Case(fp8_activations.quantise_fp8_kernel, f"group={group}", types, row, options)
        norm = {**row, "HAS_RESIDUAL": True, "UNSCALED": True, "QUANTISE": True}
        yield Case(fp8_activations.rms_norm_fp8_kernel, f"group={group}", types, norm, options)
        act = {**row, "BLOCK": 16384, "UNSCALED": True, "GELU": False, "STAGES": 2}
        options = {"num_warps": 16}
        yield Case(fp8_activations.silu_and_mul_fp8_kernel, f"group={group}", types, act, options)
    scale = {"HAS_BIAS": True, "BLOCK": 1024, "OVERLAP": True}
    yield Case(fp8_activations.scale_product_kernel, "", types, scale)
    quantised = {**types, **named("*fp8e4nv", "x", "weight")}
    for rows, gated, blocks in itertools.product((1, 64), (False, True), (False, True)):
        tuning = fp8_tuning.fp8_tuning(CPU, rows, 4096, 4096, gated=gated, blocks=blocks)
        yield Case(
            fp8_gemm.fp8_small_m_kernel,
            f"rows={rows} gated={gated} blocks={blocks}",
            quantised,
            {
                "ROWS": max(16, rows),
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "SPLITS": tuning.splits,
                "SWAP": tuning.swap,
                "BLOCKS": blocks,
                "GATED": gated,
                "HAS_BIAS": False,
                "OVERLAP": True,
                "LINES": 8,
                "bias": None,
                **({} if tuning.splits > 1 else {"partial": None}),
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )

    for rows, outputs, inner in ((1, 32768, 1024), (4, 4096, 8192), (2, 1536, 3840)):
        few = fp8_few_rows.few_fp8_tuning(CPU, rows, outputs, inner)
        yield Case(
            fp8_few_rows.fp8_few_row_kernel,
            f"rows={rows} inner={inner}",
            quantised,
            {
                "ROWS": rows, "COLS": few.cols, "DEPTH": few.depth, "INNER": inner,
                "HAS_BIAS": False, "OVERLAP": True, "bias": None,
            },
            {"num_warps": few.num_warps},
        )  # fmt: skip
    yield Case(fp8_dequantise.fp8_dequantise_kernel, "", quantised, {"ROWS": 32, "BLOCK": 128})


def fused_gate_up_cases(capability: int) -> Iterator[Case]:
    """Yields cases for Hopper alone."""
    tuning = fused_tuning.fused_tuning(CPU, gated=True)
    rows, cols, depth = tuning.rows, tuning.cols, tuning.depth
    boxes = {"x": [rows, depth], "weight": [2, cols, depth], "out": [rows, cols]}
    if capability >= 90:
        yield Case(
            fused_gate_up.fused_gate_up_kernel,
            "bf16",
            {name: f"tensordesc<bf16{box}>" for name, box in boxes.items()},
            {**tuning.sizes, "IN_PAIRS": True},
            tuning.options,
        )


def fused_qkv_cases(capability: int) -> Iterator[Case]:
    """Yields cases for Hopper alone: what takes fewest registers, and what takes most."""
    tuning = fused_tuning.fused_tuning(CPU, gated=False)
    boxes = {"x": [tuning.rows, tuning.depth], "weight": [tuning.cols, tuning.depth]}
    types = {
        **{name: f"tensordesc<bf16{box}>" for name, box in boxes.items()},
        **named("*bf16", "bias", "kv_cache", "heads"),
        **named("*i64", "positions", "slot_mapping"),
        "cos_sin_cache": "*fp32",
    }
    for head_dim, has_bias in ((64, False), (128, True)) if capability >= 90 else ():
        yield Case(
            fused_qkv.fused_qkv_kernel,
            f"head_dim={head_dim} bias={has_bias}",
            types,
            {
                "NUM_Q_HEADS": 32,
                "NUM_KV_HEADS": 8,
                "HALF": head_dim // 2,
                "BLOCK_SIZE": 16,
                **tuning.sizes,
                "HAS_BIAS": has_bias,
                "KEEP_KV": has_bias,
                "IN_PAIRS": True,
                **({} if has_bias else {"bias": None}),
            },
            tuning.options,
        )


def int8_cases(capability: int) -> Iterator[Case]:
    """Yields cases of rows and products of int8 for Hopper alone, whose copy engine they use."""
    if capability < 90:
        return
    types = {
        **named("*bf16", "residual", "weight", "bias", "out"),
        **named("*fp32", "x_scales", "w_scales", "scales", "partial", "row_scales", "col_scales"),
        **named("*i8", "numbers"),
        "x": "*bf16",
        "tickets": "*i32",
        "eps": "fp32",
    }
    row = {"GROUP": 4096, "BLOCK": 4096, "OVERLAP": True}
    yield Case(fp8_activations.quantise_fp8_kernel, "int8", types, row, {"num_warps": 8})
    norm = {**row, "HAS_RESIDUAL": True, "UNSCALED": False, "QUANTISE": True}
    norm |= {"row_scales": None, "col_scales": None}
    yield Case(fp8_activations.rms_norm_fp8_kernel, "int8", types, norm, {"num_warps": 8})
    quantised = {**types, **named("*i8", "x", "weight")}
    for rows, gated in itertools.product((1, 64), (False, True)):
        tuning = fp8_tuning.fp8_tuning(CPU, rows, 4096, 4096, gated=gated, blocks=False)
        constants = {
            "ROWS": max(16, rows),
            "COLS": tuning.cols,
            "DEPTH": tuning.depth,
            "SPLITS": tuning.splits,
            "SWAP": tuning.swap,
            "BLOCKS": False,
            "GATED": gated,
            "HAS_BIAS": False,
            "OVERLAP": True,
            "LINES": 8,
            "bias": None,
            **({} if tuning.splits > 1 else {"partial": None}),
        }
        options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
        label = f"int8 rows={rows} gated={gated}"
        yield Case(fp8_gemm.fp8_small_m_kernel, label, quantised, constants, options)
    for rows, parts in itertools.product((128, 1024, 8192), (1, 2)):
        yield int8_tile_case(rows, parts)


def int8_tile_case(num_rows: int, parts: int) -> Case:
    tuning = int8_gemm.int8_tuning(CPU, num_rows, 4096)
    rows, cols, depth = tuning.rows, tuning.cols // parts, tuning.depth
    return Case(
        int8_gemm.int8_gemm_kernel,
        f"rows={num_rows} parts={parts}",
        {
            "x": f"tensordesc<i8{[rows, depth]}>",
            "weight": f"tensordesc<i8{[parts, cols, depth]}>",
            "out": f"tensordesc<bf16{[rows, cols]}>",
            **named("*fp32", "x_scales", "w_scales"),
            "bias": "*bf16",
        },
        {
            "ROWS": rows,
            "COLS": cols,
            "DEPTH": depth,
            "PARTS": parts,
            "TILES_DOWN": int8_gemm.TILES_DOWN,
            "HAS_BIAS": False,
            "IN_PAIRS": True,
            "bias": None,
        },
        {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
    )


def int8_weight_cases(capability: int) -> Iterator[Case]:
    """Yields cases of weights in int8 beside rows in half precision, and of experts."""
    types = {
        **named("*bf16", "x", "bias", "out"),
        **named("*i8", "weight", "zeros"),
        "scales": "*fp32",
    }
    for rows, in_groups in itertools.product((1, 64), (False, True)):
        constants = {
            "ROWS": max(16, rows),
            "COLS": 32,
            "DEPTH": 128,
            "IN_GROUPS": in_groups,
            "HAS_ZEROS": in_groups,
            "HAS_BIAS": False,
            "EVEN": True,
            "OVERLAP": capability >= 90,
            "bias": None,
            **({} if in_groups else {"zeros": None}),
        }
        label = f"rows={rows} in_groups={in_groups}"
        options = {"num_warps": 4, "num_stages": 4}
        yield Case(int8_weights.int8_weight_gemm_kernel, label, types, constants, options)
    constants = {"HAS_ZEROS": True, "BLOCK": 1024}
    yield Case(int8_weights.int8_dequantise_kernel, "", types, constants)
    types = {
        **named("*fp32", "x_scales", "weight_scales", "pair_weights"),
        **named("*i32", "experts", "order", "counts"),
        **named("*i8", "weight"),
        "out": "*bf16",
    }
    tables = expert_tuning.ExpertShape(128, 768, 2048, int8_experts.FORMAT)
    for num_pairs, gated, quantises in itertools.product(
        (8, 8192, 65536) if capability >= 90 else (8,), (True, False), (True, False)
    ):
        tuning = expert_tuning.expert_tuning(tables, num_pairs, "NVIDIA_H200", gated=gated)
        is_sorted = num_pairs > expert_tuning.MAX_SEARCHED_PAIRS
        yield Case(
            int8_experts.int8_expert_gemm_kernel,
            f"pairs={num_pairs} gated={gated} quantises={quantises}",
            {**types, "x": "*i8" if quantises else "*bf16"},
            {
                "TOP_K": 8,
                "ROWS": tuning.rows,
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "GROUP": tuning.group,
                "PAIRS": 1 if is_sorted else max(16, num_pairs),
                "TILES": 1,
                "EXPERTS": 128,
                "GATED": gated,
                "SORTED": is_sorted,
                "BY_PAIR": num_pairs <= 128,
                "OVERLAP": capability >= 90 and not is_sorted,
                "EVEN": True,
                **({} if quantises else {"x_scales": None}),
                **({} if is_sorted else {"order": None, "counts": None}),
            },
            tuning.options,
        )


def int4_cases(capability: int) -> Iterator[Case]:
    for dtype in DTYPES if capability >= 90 else ("bf16",):
        types = {
            **named(f"*{dtype}", "x", "bias", "out"),
            **named("*i32", "groups", "arrived"),
            "packed": "*i16",
            "parts": "*fp32",
        }
        many = capability >= 90 and dtype == "bf16"
        shapes = list(itertools.product((1, 32, 64, 256) if many else (1,), (4096,), (False, True)))
        for rows, outputs, gated in [*shapes, (256, 14336, True)] if many else shapes:
            tuning = int4_tuning.int4_tuning(CPU, rows, outputs, 4096, gated=gated)
            yield Case(
                int4_gemm.int4_gemm_kernel,
                f"{dtype} rows={rows} outputs={outputs} gated={gated}",
                types,
                {
                    "ROWS": tuning.rows,
                    "COLS": tuning.cols,
                    "BLOCK": 256,
                    "GROUP": 128,
                    "SPLITS": tuning.splits,
                    "SWAPPED": tuning.swapped,
                    "GATED": gated,
                    "HAS_BIAS": False,
                    "EVEN": True,
                    "IN_PAIRS": True,
                    "OVERLAP": capability >= 90,
                    "AHEAD": tuning.ahead,
                    "LATE": tuning.late,
                    "LANES": 64 // tuning.pieces,
                    "bias": None,
                    **({} if tuning.splits > 1 else {"parts": None, "arrived": None}),
                },
                {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
            )
        if dtype == "fp16":
            continue
        steps = (8, 8192, 65536) if many else (8,)
        yield from int4_expert_cases(steps, overlaps=many)
        yield Case(
            int4_dequantise.int4_dequantise_kernel,
            dtype,
            types,
            {"COLS": 32, "BLOCK": 128, "GROUP": 32, "IN_PAIRS": True},
        )


def fp4_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*bf16", "x", "bias", "out"),
        **named("*i32", "weight", "tiles", "arrived"),
        **named("*fp32", "factors", "parts"),
    }
    steps = (1, 16, 32, 64, 128) if capability >= 90 else (1,)
    for rows, gated, words in itertools.product(steps, (False, True), (544, 576)):
        if words == 544 and rows not in (1, 64):
            continue
        tuning = fp4_tuning.fp4_tuning(CPU, rows, 4096, 4096, gated=gated)
        yield Case(
            fp4_gemm.fp4_gemm_kernel,
            f"rows={rows} gated={gated} words={words}",
            types,
            {
                "ROWS": tuning.rows,
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "SPLITS": tuning.splits,
                "GATED": gated,
                "HAS_BIAS": False,
                "BY_WARP": tuning.num_warps < 4,
                "EVEN": True,
                "IN_PAIRS": True,
                "WAITS": tuning.num_warps >= 4 and capability == 90,
                "PRECISION": "tf32",
                "TILE": words,
                "OVERLAP": capability >= 90,
                "AHEAD": tuning.ahead,
                "bias": None,
                **({} if words == 576 else {"factors": None}),
                **({} if tuning.splits > 1 else {"parts": None, "arrived": None}),
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )
    for words in (544, 576):
        yield Case(
            fp4_dequantise.fp4_dequantise_kernel,
            f"words={words}",
            types,
            {
                "COLUMN_TILES": 2,
                "IN_PAIRS": True,
                "TILE": words,
                **({} if words == 576 else {"factors": None}),
            },
        )


def int4_expert_cases(steps: tuple[int, ...], *, overlaps: bool) -> Iterator[Case]:
    types = {
        **named("*bf16", "x", "out"),
        **named("*i32", "groups", "experts", "order", "counts"),
        **named("*fp32", "pair_weights"),
        "packed": "*i16",
    }
    tables = expert_tuning.ExpertShape(128, 768, 2048, int4_experts.FORMAT)
    for num_pairs, gated in itertools.product(steps, (True, False)):
        tuning = expert_tuning.expert_tuning(tables, num_pairs, "NVIDIA_H200", gated=gated)
        is_sorted = num_pairs > expert_tuning.searched_pairs(tables.weights)
        yield Case(
            int4_experts.int4_expert_gemm_kernel,
            f"pairs={num_pairs} gated={gated}",
            types,
            {
                "TOP_K": 8,
                "ROWS": tuning.rows,
                "COLS": tuning.cols,
                "TILE_GROUP": tuning.group,
                "PAIRS": 1 if is_sorted else max(16, num_pairs),
                "TILES": 1,
                "EXPERTS": 128,
                "GATED": gated,
                "SORTED": is_sorted,
                "BY_PAIR": num_pairs <= 128,
                "OVERLAP": overlaps and not is_sorted,
                "BLOCK": 256,
                "GROUP": 128,
                "LATE": tuning.rows <= int4_experts.LATE_ROWS,
                "EVEN": True,
                "IN_PAIRS": True,
                **({} if is_sorted else {"order": None, "counts": None}),
            },
            tuning.options,
        )


def invariant_cases(_: int) -> Iterator[Case]:
    yield Case(
        invariant_gemm.invariant_gemm_kernel,
        "",
        named("*bf16", "x", "weight", "bias", "out"),
        {
            "HAS_BIAS": True,
            "PRECISION": "tf32",
            "ROWS": invariant_gemm.ROWS,
            "COLS": invariant_gemm.COLS,
            "DEPTH": invariant_gemm.DEPTH,
            "GROUP": 8,
        },
        {"num_warps": 4, "num_stages": 4},
    )


def rope_cases(capability: int) -> Iterator[Case]:
    shapes = [("bf16", 128, False, False), ("bf16", 80, True, True), ("fp16", 192, True, False)]
    for dtype, head_dim, head_norm, is_fp8 in shapes if capability >= 90 else shapes[:1]:
        value_half = 64 if head_dim == 192 else head_dim // 2
        weights = ["q_weight", "k_weight"]
        heads, num_warps = rope_and_cache.HEADS_PER_PROGRAM, 2
        if dtype == "fp16":
            heads, num_warps = rope_and_cache.WIDE_HEADS, rope_and_cache.WIDE_WARPS
        yield Case(
            rope_and_cache.rope_and_cache_kernel,
            f"{dtype} head_dim={head_dim} head_norm={head_norm}",
            {
                **named(f"*{dtype}", "q", "k", "v", *weights),
                "kv_cache": "*u8" if is_fp8 else f"*{dtype}",
                **named("*i64", "positions", "slot_mapping"),
                **named("*fp32", "cos_sin_cache", *NO_SCALES),
                **named("fp32", "eps", "value_scale"),
            },
            {
                "NUM_Q_HEADS": 32,
                "NUM_KV_HEADS": 8,
                "HALF": head_dim // 2,
                "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
                "VALUE_HALF": value_half,
                "BLOCK_VALUE_HALF": triton.next_power_of_2(value_half),
                "NORM_VALUES": head_dim == 80,
                "SCALE_VALUES": head_dim == 192,
                "BLOCK_SIZE": 64,
                "HEADS": heads,
                "HAS_NORM": head_norm,
                "OVERLAP": capability >= 90,
                "USE_PDL": capability >= 90,
                "KEEP_K": head_norm,
                "FP8": is_fp8,
                **({} if head_norm else dict.fromkeys(weights)),
                **({} if is_fp8 else NO_SCALES),
            },
            {"num_warps": num_warps},
        )


def attention_cases(capability: int) -> Iterator[Case]:
    """Yields cases of caches in 16 bits, and in FP8 where the GPU has its conversions."""
    dtype = "bf16"
    sizes = [(*widths, False) for widths in HEAD_SIZES[capability]]
    quantised = [(128, 128, True), (192, 128, True), (256, 256, True)] if capability >= 90 else []
    for head_dim, value_dim, is_fp8 in [*sizes, *quantised]:
        types = {
            **named(f"*{dtype}", "q", "kv_cache", "out"),
            **named("*i32", "block_tables", "query_start_loc", "seq_lens", "arrived", "tickets"),
            **named("*fp32", "partial_acc", "partial_state", "sinks", "k_scale", "v_scale"),
            **named("fp32", "scale", "cap"),
        }
        kind = {"FP8": is_fp8, **({} if is_fp8 else NO_SCALES)}
        shape = {
            "NUM_KV_HEADS": 8,
            "GROUP": 4,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": triton.next_power_of_2(head_dim),
            "VALUE_DIM": value_dim,
            "BLOCK_VALUE": triton.next_power_of_2(value_dim),
            "REQS": 16,
        }
        label = f"{dtype} head_dim={head_dim} fp8={is_fp8}"
        vary = (head_dim, capability, is_fp8) == (128, 90, False)
        cached = torch.float8_e4m3fn if is_fp8 else DTYPES[dtype]
        decode = decode_tuning.decode_tuning(CPU, 8 * 64, head_dim, cached)
        plain = {"WINDOW": 0, "HAS_SINKS": False, "sinks": None}
        rare = {"WINDOW": 1024, "HAS_SINKS": True}
        shape_of_tile = {**shape, "TILE": decode.tile, "OVERLAP": capability >= 90}
        few = not is_fp8 and (vary or head_dim == 64)
        decodes = [(64, False), *([(16, False)] if vary else []), *([(64, True)] if few else [])]
        for block_size, ahead in decodes:
            joins = {"JOINED": not ahead, "HEADS": 4}
            joins["PARTS"] = decode_join.parts_at_once(4, shape["BLOCK_VALUE"])
            decode = decode_tuning.decode_tuning(CPU, 8 if ahead else 8 * 64, head_dim, cached)
            yield Case(
                decode_attention.decode_attention_kernel,
                f"{label} block_size={block_size} ahead={ahead}",
                {**types, **({"kv_cache": "*i16"} if is_fp8 else {})},
                {
                    **shape,
                    **kind,
                    "TILE": decode.tile,
                    "OVERLAP": capability >= 90,
                    "AHEAD": ahead,
                    **joins,
                    **({"tickets": None} if ahead else {}),
                    "NATIVE": True,
                    "BLOCK_SIZE": block_size,
                    "ROWS": 16,
                    "PRECISION": "tf32",
                    "CAPPED": False,
                    **(rare if block_size == 16 else plain),
                },
                {"num_warps": decode.num_warps, "num_stages": decode.num_stages},
            )
        if not is_fp8 and head_dim <= 128:
            window = 128 if head_dim <= 64 else 64
            yield Case(
                window_attention.window_attention_kernel,
                label,
                types,
                {
                    **{name: value for name, value in shape.items() if name != "REQS"},
                    "BLOCK_SIZE": 64,
                    "ROWS": 16,
                    "WINDOW": window,
                    "SPAN": window,
                    "PRECISION": "tf32",
                    "CAPPED": False,
                    "HAS_SINKS": True,
                    "OVERLAP": capability >= 90,
                },
                {"num_warps": 4},
            )
        merge = shape_of_tile | decode_merge.merge_shape(8, shape["BLOCK_VALUE"])
        merge |= {"ROWS": 64, "BY_HEAD": True, "ALIGNED": False, **(rare if vary else plain)}
        del merge["HEAD_DIM"], merge["BLOCK_DIM"]
        yield Case(decode_merge.merge_kernel, label, types, merge)
        few = ((16, 16, 64), (256, 2048, 128))
        more = (*few, (8192, 2**20, 16)) if vary else few if is_fp8 else ()
        for max_rows, total_rows, block_size in ((8192, 2**20, 128), *more):
            prefill = prefill_tuning.prefill_tuning(CPU, 
                max_rows, total_rows, 8192, head_dim, DTYPES[dtype], block_size,
                by_warpgroups=capability >= 90 and not is_fp8,
            )  # fmt: skip
            described = capability >= 90 and block_size % prefill.tile == 0 and prefill.tile >= 64
            described &= head_dim == value_dim
            box = f"[1, {prefill.tile}, {shape['BLOCK_DIM']}]"
            pages = "fp8e4nv" if is_fp8 else dtype
            described_type = {"tiles_of_blocks": f"tensordesc<{pages}{box}>"}
            yield Case(
                prefill_attention.prefill_attention_kernel,
                f"{label} rows={prefill.rows} block_size={block_size}",
                {**types, "kv_cache": f"*{pages}", **(described_type if described else {})},
                {
                    **kind,
                    **{name: value for name, value in shape.items() if name != "REQS"},
                    "ROWS": prefill.rows,
                    "TILE": prefill.tile,
                    "BLOCK_Q": prefill.rows // 4,
                    "BLOCK_SIZE": block_size,
                    "PRECISION": "tf32",
                    "DESCRIBED": described,
                    "OVERLAP": capability >= 90 and max_rows == 16,
                    **({"IN_PARTS": True} if prefill.in_parts else NO_PARTS),
                    **(rare if vary and block_size == 16 else plain),
                    "CAPPED": vary and block_size == 16,
                    **({} if described else {"tiles_of_blocks": None}),
                },
                {"num_warps": prefill.num_warps, "num_stages": prefill.num_stages},
            )


def expert_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*bf16", "x", "weight", "out", "parts", "beside"),
        **named(
            "*fp32", "pair_weights", "weights", "bias", "logit_bias", "expert_scales", "logits"
        ),
        **named("*i32", "experts", "order", "counts", "own_numbers"),
        **named("fp32", "scaling", "limit", "alpha"),
        **named("*i64", "slot_mapping", "loads"),
    }
    route = {"NUM_EXPERTS": 60, "LANES": 64, "TOP_K": 6, "K_LANES": 8, "TOP_GROUPS": 2}
    for has_bias in (False, True):
        yield Case(
            route_tokens.route_tokens_kernel,
            f"bias={has_bias}",
            {**types, "table": "*i32"},
            {
                **route,
                "SIGMOID": False,
                "ROOT_SOFTPLUS": has_bias,
                "LISTED": not has_bias,
                "RENORMALISE": has_bias,
                "NUM_GROUPS": 4 if has_bias else 1,
                "HAS_BIAS": has_bias,
                "HAS_LOGIT_BIAS": not has_bias,
                "HAS_SCALES": not has_bias,
                "COPIES": 3 if has_bias else 0,
                "COUNTED": has_bias,
                "OVERLAP": capability >= 90,
            },
            {"num_warps": 1},
        )
    yield Case(
        expert_rows.sort_pairs_kernel, "", types, {"CHUNK": expert_rows.CHUNK}, {"num_warps": 16}
    )
    of_pairs = {"TOP_K": 8, "IN_PAIRS": True, "HAS_BESIDE": True}
    yield Case(
        expert_sums.sum_pairs_kernel,
        "",
        types,
        {**of_pairs, "BLOCK": 1024, "OVERLAP": capability >= 90},
        {"maxnreg": 128},
    )
    yield Case(
        expert_sums.pairs_add_rms_norm_kernel,
        "",
        types | named("*bf16", "residual", "given", "gate"),
        {**of_pairs, "HAS_GATE": True, "BLOCK": 4096, "OVERLAP": capability >= 90},
        {"num_warps": 16, "maxnreg": 128},
    )
    many = capability >= 90
    types |= named("*bf16", "shared_x", "shared_weight", "shared_out")
    for num_pairs, gated in itertools.product((8, 256, 8192, 65536) if many else (65536,), (1, 0)):
        shape = expert_tuning.ExpertShape(128, 768, 2048)
        gate = {8192: 1, 65536: 4 if many else 0}.get(num_pairs, 0) * gated
        tuning = expert_tuning.expert_tuning(shape, num_pairs, "NVIDIA_H200", gated=bool(gated))
        tuning = tuning.within(SHARED_BYTES[capability], 2 if gated and gate != 4 else 1, 2)
        is_sorted = num_pairs > expert_tuning.MAX_SEARCHED_PAIRS
        yield Case(
            fused_experts.expert_gemm_kernel,
            f"pairs={num_pairs} gated={gated}",
            types,
            {
                "TOP_K": 8,
                "ROWS": tuning.rows,
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "GROUP": tuning.group,
                "PAIRS": 1 if is_sorted else max(16, num_pairs),
                "TILES": 1,
                "EXPERTS": 128,
                "GATED": bool(gated),
                "SORTED": is_sorted,
                "BY_PAIR": num_pairs <= 128,
                "OVERLAP": capability >= 90 and not is_sorted,
                "HAS_BIAS": num_pairs == 8192,
                "GATE": gate,
                "EVEN": num_pairs != 8192,
                "PRECISION": "tf32",
                "SHARED": 16 if num_pairs == 8 else 0,
            },
            tuning.options,
        )


def one_row_expert_cases(capability: int) -> Iterator[Case]:
    """Yields the experts of Qwen3.5-35B-A3B, and those of Nemotron 3 Nano."""
    types = {
        **named("*bf16", "x", "weight", "out", "shared_x", "shared_weight", "shared_out"),
        **named("fp32", "limit", "alpha"),
        "pair_weights": "*fp32",
        "experts": "*i32",
    }
    for rows, inner, shared_inner, gate, pairs in (
        (2, 2048, 2048, 0, 0),
        (1, 2688, 2688, 4, 0),
        (1, 1856, 3712, 0, 0),
        (2, 7168, 7168, 0, 8),
        (1, 1856, 3712, 0, 8),
    ):
        tuning = one_row_experts.one_row_tuning(rows, inner)
        yield Case(
            one_row_experts.one_row_expert_kernel,
            f"inner={inner} pairs={pairs}",
            types,
            {
                "PAIRS": pairs,
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "INNER": inner,
                "SHARED": 16,
                "SHARED_INNER": shared_inner,
                "GATED": inner > 2000,
                "GATE": gate,
                "OVERLAP": capability >= 90,
            },
            tuning.options,
        )


def fp8_expert_cases(capability: int) -> Iterator[Case]:
    if capability < 90:
        return
    types = {
        **named("*fp8e4nv", "x", "weight"),
        **named("*fp32", "x_scales", "weight_scales", "out_scales", "pair_weights"),
        **named("*i32", "experts", "order", "counts"),
        **named("fp32", "limit", "alpha"),
        "bias": "*bf16",
    }
    tables = expert_tuning.ExpertShape(128, 768, 2048, fp8_experts.FORMAT)
    for num_pairs, gated in itertools.product((8, 8192, 65536), (True, False)):
        tuning = expert_tuning.expert_tuning(tables, num_pairs, "NVIDIA_H200", gated=gated)
        is_sorted = num_pairs > expert_tuning.MAX_SEARCHED_PAIRS
        quantises = gated and tuning.cols == 128
        yield Case(
            fp8_experts.fp8_expert_gemm_kernel,
            f"pairs={num_pairs} gated={gated}",
            {**types, "out": "*fp8e4nv" if quantises else "*bf16"},
            {
                "TOP_K": 8,
                "ROWS": tuning.rows,
                "COLS": tuning.cols,
                "GROUP": tuning.group,
                "PAIRS": 1 if is_sorted else max(16, num_pairs),
                "TILES": 1,
                "EXPERTS": 128,
                "GATED": gated,
                "SORTED": is_sorted,
                "BY_PAIR": num_pairs <= 128,
                "OVERLAP": capability >= 90 and not is_sorted,
                "HAS_BIAS": not gated,
                "GATE": 0,
                "BLOCKS": num_pairs != 8,
                "QUANTISES": quantises,
                "WIDE": tuning.rows >= 64,
                "EVEN": num_pairs != 8,
                "STRIPS": 2 if num_pairs == 65536 and not gated else 1,
                **({} if quantises else {"out_scales": None}),
                **({} if is_sorted else {"order": None, "counts": None}),
            },
            tuning.options,
        )


def fp8_pair_cases(capability: int) -> Iterator[Case]:
    """Yields both GEMMs of DeepSeek V3 on a rank of eight, and ones that quantise no row."""
    if capability < 90:
        return
    types = {
        **named("*fp8e4nv", "x", "weight"),
        **named("*fp32", "shares", "weight_scales", "pair_weights"),
        **named("*bf16", "bias", "out"),
        **named("fp32", "limit", "alpha"),
        "experts": "*i32",
    }
    for gated, quantises, inner, cols, depth, pairs in (
        (True, False, 7168, 2, 2048, 0),
        (False, True, 256, 16, 256, 0),
        (False, False, 1536, 4, 512, 0),
        (True, False, 7168, 4, 1024, 64),
        (False, True, 2048, 16, 2048, 64),
    ):
        yield Case(
            fp8_pairs.fp8_pair_gemm_kernel,
            f"gated={gated} inner={inner} pairs={pairs}",
            {**types, **(named("*bf16", "x", "shares") if quantises else {})},
            {
                "PAIRS": pairs,
                "TOP_K": 8,
                "COLS": cols,
                "DEPTH": depth,
                "INNER": inner,
                "GATED": gated,
                "HAS_BIAS": inner == 1536,
                "GATE": 0,
                "BLOCKS": inner != 1536,
                "QUANTISES": quantises,
                "OVERLAP": True,
            },
            {"num_warps": max(1, depth // 512), "num_stages": 1},
        )


def fp8_ahead_cases(capability: int) -> Iterator[Case]:
    """Yields what multiplies prompts of DeepSeek V3 and of Qwen3-30B-A3B."""
    types = {
        **named("*i32", "order", "counts", "tiles", "places", "experts"),
        **named("*fp32", "shares", "weight_scales", "pair_weights", "scales", "out_scales"),
        "limit": "fp32",
    }
    if capability < 90:
        return
    of_tiles = {"HEIGHT": 128, "EXPERTS": 256}
    yield Case(sorted_rows.sorted_tiles_kernel, "", types, of_tiles, {"num_warps": 1})
    yield Case(
        sorted_rows.quantise_to_places_kernel,
        "",
        {**types, "x": "*bf16", "numbers": "*fp8e4nv"},
        {"TOP_K": 8, "GROUP": 128, "BLOCK": 1024},
        {"num_warps": 4},
    )
    layout = repr(fp8_experts_ahead.TILE)
    boxes = {"x": [64, 128], "weight": [128, 128]}
    described = {name: f"tensordesc<fp8e4nv{box},{layout}>" for name, box in boxes.items()}
    for gated, blocks in ((True, True), (False, True), (True, False)):
        yield Case(
            fp8_experts_ahead.fp8_experts_ahead_kernel,
            f"gated={gated} blocks={blocks}",
            {**types, **described, "out": "*fp8e4nv" if gated else "*bf16"},
            {
                "STAGES": 4, "REGISTERS": 224, "COPIER_REGISTERS": 56, "GATED": gated,
                "BLOCKS": blocks,
                "GATE": 5 if gated else 0, **({} if gated else {"out_scales": None}),
            },
            {"num_warps": 4},
        )  # fmt: skip


def fp4_expert_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*bf16", "x", "out", "bias"),
        **named("*i32", "weight", "experts", "order", "counts"),
        **named("fp32", "limit", "alpha"),
        **named("*fp32", "factors", "pair_weights", "sums"),
        "arrived": "*i32",
    }
    shape = expert_tuning.ExpertShape(128, 2880, 2880, "mxfp4")
    sizes = (4, 2048, 8192, 32768) if capability >= 90 else (4,)
    cases = [
        (
            num_pairs,
            gated,
            expert_tuning.expert_tuning(shape, num_pairs, "NVIDIA_H200", gated=gated),
        )
        for num_pairs, gated in itertools.product(sizes, (True, False))
    ]
    if capability >= 90:
        unrolled = {"extra_rows": 16, "spares_extra": True, "unroll": 2, "strips": 2}
        cases.append((8192, False, expert_tuning.ExpertTuning(64, 128, 64, 4, 2, **unrolled)))
    tiled = [(544, case) for case in cases] + [(576, case) for case in cases[1:6:2]]
    for words, (num_pairs, gated, tuning) in tiled:
        is_sorted = num_pairs > expert_tuning.searched_pairs(shape.weights)
        yield Case(
            fp4_experts.fp4_expert_gemm_kernel,
            f"pairs={num_pairs} gated={gated} strips={tuning.strips} words={words}",
            types,
            {
                "TOP_K": 4,
                "ROWS": tuning.rows,
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "GROUP": tuning.group,
                "SPLITS": tuning.splits,
                "BY_WARP": tuning.num_warps < 4,
                "EXTRA": tuning.extra_rows,
                "SPARES_EXTRA": tuning.spares_extra,
                "UNROLL": tuning.unroll,
                "STRIPS": tuning.strips,
                "HALF_LAST": num_pairs == 8192 and gated,
                "PAIRS": 1 if is_sorted else max(16, num_pairs),
                "TILES": 1,
                "EXPERTS": 128,
                "GATED": gated,
                "SORTED": is_sorted,
                "BY_PAIR": num_pairs <= 128,
                "OVERLAP": capability >= 90 and not is_sorted,
                "HAS_BIAS": True,
                "GATE": int(gated),
                "EVEN": gated,
                "IN_PAIRS": True,
                "WAITS": tuning.num_warps >= 4 and capability == 90,
                "PRECISION": "tf32",
                "TILE": words,
                **({} if words == 576 else {"factors": None}),
                **({} if is_sorted else {"order": None, "counts": None}),
            },
            tuning.options,
        )


def fp4_even_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*bf16", "x", "out", "bias"),
        **named("*i32", "weight", "experts", "arrived"),
        **named("fp32", "limit", "alpha"),
        **named("*fp32", "factors", "pair_weights", "sums"),
    }
    for gated, words in ((True, 544), (False, 544), (False, 576)):
        yield Case(
            even_runs.fp4_even_gemm_kernel,
            f"gated={gated} words={words}",
            types,
            {
                "TOP_K": 4, "ROWS": 8, "COLS": 64, "DEPTH": 64, "PAIRS": 32, "GATED": gated,
                "HAS_BIAS": True, "GATE": int(gated), "BY_WARP": True, "EVEN": True,
                "IN_PAIRS": True, "WAITS": False, "PRECISION": "tf32",
                "OVERLAP": capability >= 90, "TILE": words,
                **({} if words == 576 else {"factors": None}),
            },
            {"num_warps": 2, "num_stages": 4},
        )  # fmt: skip


def fp4_few_row_cases(capability: int) -> Iterator[Case]:
    """Yields what Hopper alone runs."""
    if capability != 90:
        return
    tuning = expert_warp_tuning(CPU, 2880, 2880)
    yield Case(
        fp4_few_rows.fp4_few_row_gate_up_kernel,
        "",
        {
            **named("*bf16", "x", "out", "bias"),
            **named("*i32", "weight", "experts"),
            **named("fp32", "limit", "alpha"),
        },
        {
            "TOP_K": 4, "WARPS": tuning.warps, "AHEAD": tuning.ahead, "STRIPS": tuning.strips,
            "COLUMNS": 45, "HAS_BIAS": True, "GATE": 1, "OVERLAP": True,
        },
        {"num_warps": tuning.warps, "maxnreg": tuning.registers},
    )  # fmt: skip


def fp4_expert_ahead_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*bf16", "x", "out"),
        **named("*i32", "weight", "order", "counts", "pairs", "tiles"),
        **named("fp32", "limit"),
        **named("*fp32", "pair_weights"),
    }
    of_tiles = {"HEIGHT": 128, "PLACES": 128, "EXPERTS": 256}
    yield Case(expert_tiles.expert_tiles_kernel, "", types, of_tiles, {"num_warps": 1})
    for gated in (True, False) if capability == 90 else ():
        yield Case(
            experts_ahead.fp4_experts_ahead_kernel,
            f"gated={gated}",
            types,
            {
                "TOP_K": 6, "STAGES": 6, "GATED": gated, "GATE": 5 if gated else 0, "PLACES": 128,
                "TILE": 544,
            },
            {"num_warps": 8},
        )  # fmt: skip


def fp4_pair_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*bf16", "x", "out", "bias"),
        **named("*i32", "weight", "experts", "arrived"),
        **named("fp32", "limit", "alpha", "scaling"),
        **named("*fp32", "factors", "pair_weights", "sums", "logits"),
        "slot_mapping": "*i64",
    }
    cases = [
        (True, 2, False, False, 544),
        (False, 4, False, False, 544),
        (True, 2, True, True, 544),
        (False, 2, False, True, 544),
        (True, 1, True, False, 544),
        (True, 2, True, False, 576),
        (False, 4, False, False, 576),
    ]
    for gated, num_warps, is_routed, is_late, words in cases:
        yield Case(
            fp4_pairs.fp4_pair_gemm_kernel,
            f"gated={gated} routed={is_routed} late={is_late} words={words}",
            types,
            {
                "TOP_K": 4,
                "ROWS": 8 if num_warps < 4 else 16,
                "COLS": 64,
                "DEPTH": 64 if gated or is_late else 128,
                "SPLITS": 5,
                "GATED": gated,
                "HAS_BIAS": True,
                "GATE": int(gated),
                "BY_WARP": num_warps < 4,
                "EVEN": gated or is_late,
                "IN_PAIRS": True,
                "WAITS": num_warps >= 4 and capability == 90,
                "PRECISION": "tf32",
                "OVERLAP": capability >= 90,
                "NUM_EXPERTS": 128 if is_routed else 0,
                "LANES": 128 if is_routed else 1,
                "RENORMALISE": is_routed,
                "WARPS": num_warps,
                "ADDS": not gated,
                "LATE": is_late,
                "UNROLL": 3 if is_late else 1,
                "TILE": words,
                **({} if words == 576 else {"factors": None}),
                **({} if is_routed else {"logits": None, "slot_mapping": None}),
            },
            {"num_warps": num_warps, "num_stages": 2 if is_late else 4},
        )


def fp4_one_row_cases(capability: int) -> Iterator[Case]:
    """Yields what Hopper alone runs."""
    if capability != 90:
        return
    types = {
        **named("*bf16", "x", "out", "bias"),
        **named("*i32", "weight", "experts"),
        **named("fp32", "limit", "alpha", "scaling"),
        **named("*fp32", "logits", "pair_weights"),
        "slot_mapping": "*i64",
    }
    tuning = one_row_tuning(CPU, 2880, 2880)
    gate_up, down = fp4_one_row.fp4_one_row_gate_up_kernel, fp4_one_row.fp4_one_row_down_kernel
    for num_experts, renormalises in ((32, True), (128, False)):
        for kernel, of_pair, warps, ahead, registers, own in (
            (gate_up, tuning.warps, tuning.warps, tuning.ahead, tuning.registers, {"GATE": 1}),
            (
                down,
                tuning.down_warps,
                4 * tuning.down_warps,
                tuning.down_ahead,
                tuning.down_registers,
                {"RENORMALISE": renormalises, "OF_PAIR": tuning.down_warps},
            ),
        ):
            yield Case(
                kernel,
                f"experts={num_experts}",
                types,
                {
                    "TOP_K": 4, "NUM_EXPERTS": num_experts, "LANES": num_experts, "HAS_BIAS": True,
                    **own, "WARPS": warps, "TURNS": -(-15 // of_pair), "AHEAD": ahead,
                    "EVEN": False, "OVERLAP": True,
                },
                {"num_warps": warps, "maxnreg": registers},
            )  # fmt: skip


def normed_router_cases(capability: int) -> Iterator[Case]:
    """Yields what Hopper runs, as for other few rows."""
    types = {
        **named("*bf16", "x", "norm_weight", "weight", "normed"),
        **named("*fp32", "bias", "logits"),
        "eps": "fp32",
    }
    for rows in (1, 4, 8) if capability >= 90 else ():
        few = rows <= router_shapes.FEW
        tuning = normed_router.TUNING if few else normed_router.TUNING_OF_MANY
        yield Case(
            normed_router.normed_router_kernel,
            f"rows={rows}",
            types,
            {
                "ROWS": rows,
                "COLS": tuning.cols,
                "DEPTH": 4096,
                "SHARE": 48,
                "VECTOR": normed_router.VECTOR,
                "HAS_BIAS": True,
                "OVERLAP": True,
            },
            {"num_warps": 4096 // (32 * tuning.lanes)},
        )


def latent_cases(capability: int) -> Iterator[Case]:
    """Yields cases of caches in 16 bits, and in FP8 where the GPU has its conversions."""
    for is_fp8 in (False, True) if capability >= 90 else (False,):
        yield from _latent_cases(capability, is_fp8)


def _latent_cases(capability: int, is_fp8: bool) -> Iterator[Case]:
    cached = "*fp8e4nv" if is_fp8 else "*bf16"
    scales = {"FP8": is_fp8, **({} if is_fp8 else {"kv_scale": None})}
    types = {
        **named("*bf16", "q_latent", "q_rope", "kv", "weight"),
        "kv_cache": cached,
        **named("*i32", "block_tables", "query_start_loc", "seq_lens"),
        **named("*i64", "positions", "slot_mapping"),
        **named(
            "*fp32", "state", "parts", "partial_acc", "partial_state", "cos_sin_cache", "kv_scale"
        ),
        **named("fp32", "scale", "eps"),
    }
    shape = {"LATENT": 512, "BLOCK_LATENT": 512}
    yield Case(
        latent_rope_and_cache.latent_rope_and_cache_kernel,
        f"fp8={is_fp8}",
        {**types, "kv_cache": "*u8" if is_fp8 else cached},
        {
            **shape, **scales, "NUM_HEADS": 16, "HEADS": 16, "HALF": 32, "BLOCK_HALF": 32,
            "BLOCK_SIZE": 64, "OVERLAP": capability >= 90,
        },
    )  # fmt: skip
    for units in () if is_fp8 else (8, 64):  # Parts are the same ones.
        yield Case(
            decode_merge.merge_kernel,
            f"latents units={units}",
            {**types, "out": "*bf16"},
            {
                "NUM_KV_HEADS": 1, "GROUP": 16, "ROWS": 16, "VALUE_DIM": 512, "TILE": 64,
                "REQS": 16, "WINDOW": 0, "HAS_SINKS": False, "sinks": None, "ALIGNED": True,
                "BY_HEAD": units == 8, "OVERLAP": capability >= 90,
                **decode_merge.merge_shape(units, 512),
            },
        )  # fmt: skip
    for num_rows, num_decodes, block_size in (
        (16, 1, 64),
        (16, 64, 64),
        (16, 64, 16),
        (128, 64, 64),
    ):
        tuning = latent_decode.latent_decode_tuning(
            CPU, num_rows, 2, num_decodes, turns=capability >= 90 and not is_fp8
        )
        yield Case(
            latent_decode.latent_decode_kernel,
            f"rows={tuning.rows} turned={tuning.turned} block={block_size} fp8={is_fp8}",
            {**types, "out": "*bf16", **({"kv_cache": "*i16"} if is_fp8 else {})},
            {
                **shape,
                **scales,
                "QUERY_LEN": 1,
                "NUM_HEADS": tuning.rows,
                "ROWS": tuning.rows,
                "ROW_TILES": 1,
                "ROPE": 64,
                "BLOCK_ROPE": 64,
                "BLOCK_SIZE": block_size,
                "TILE": tuning.tile,
                "REQS": 16,
                "TURNED": tuning.turned,
                "OVERLAP": capability >= 90,
                "PRECISION": "tf32",
                "NATIVE": True,
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )
    if capability >= 90:
        yield from latent_few_cases(types, is_fp8)
    if capability >= 90 and not is_fp8:
        yield from latent_ahead_cases(types)
    yield Case(
        latent_merge.latent_merge_kernel,
        "",
        {**types, "out": "*bf16"},
        {**shape, "SPLITS": 4, "OVERLAP": capability >= 90},
    )
    tuning = latent_attention.latent_tuning(CPU, 2)
    yield Case(
        latent_attention.latent_attention_kernel,
        f"rows={tuning.rows} fp8={is_fp8}",
        {**types, "out": "*bf16", **({"kv_cache": "*i16"} if is_fp8 else {})},
        {
            **shape,
            **scales,
            "NUM_HEADS": 16,
            "HEADS": 16,
            "ROPE": 64,
            "BLOCK_ROPE": 64,
            "BLOCK_SIZE": 64,
            "BLOCK_Q": tuning.rows // 16,
            "TILE": tuning.tile,
            "NATIVE": True,
            "PRECISION": "tf32",
        },
        {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
    )


def latent_few_cases(types: Mapping[str, str], is_fp8: bool) -> Iterator[Case]:
    """Yields what Hopper runs of decodes with few heads."""
    for query_len, block_size in ((1, 64), (3, 16)):
        box = [1, min(64, block_size), 64]
        described = f"tensordesc<bf16{box},{latent_decode_ahead.BOX!r}>"
        yield Case(
            latent_decode_few.latent_decode_few_kernel,
            f"query_len={query_len} block={block_size} fp8={is_fp8}",
            {**types, "out": "*bf16", "kv_cache": "*i32" if is_fp8 else described},
            {
                "QUERY_LEN": query_len, "NUM_HEADS": 16, "ROWS": 16, "ROW_TILES": query_len,
                "LATENT": 512, "ROPE": 64, "BLOCK_SIZE": block_size, "TILE": 64, "REQS": 16,
                "FP8": is_fp8, "WORKER_REGISTERS": 200 if is_fp8 else 40, "OVERLAP": True,
                **({} if is_fp8 else {"kv_scale": None}),
            },
            {"num_warps": 4, "launch_pdl": True},
        )  # fmt: skip


def latent_ahead_cases(types: Mapping[str, str]) -> Iterator[Case]:
    """Yields what Hopper runs of decodes with many heads."""
    tuning = latent_decode.latent_decode_tuning(CPU, 128, 2, 8, turns=True, is_ahead=True)
    for query_len, block_size, reqs in ((1, 64, 16), (2, 16, 256)):
        box = [1, min(64, block_size), 64]
        described = f"tensordesc<bf16{box},{latent_decode_ahead.BOX!r}>"
        yield Case(
            latent_decode_ahead.latent_decode_ahead_kernel,
            f"query_len={query_len} block={block_size}",
            {**types, "out": "*bf16", "kv_cache": described, "numbers": "*bf16"},
            {
                "QUERY_LEN": query_len, "NUM_HEADS": 128, "ROWS": tuning.rows,
                "ROW_TILES": 128 * query_len // tuning.rows, "LATENT": 512, "ROPE": 64,
                "BLOCK_SIZE": block_size, "TILE": tuning.tile, "REQS": reqs, "OVERLAP": True,
                "COPIER_REGISTERS": 40,
            },
            {"num_warps": tuning.num_warps, "launch_pdl": True},
        )  # fmt: skip


def ragged_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*bf16", "q", "k", "v", "out", "part", "kv_cache", "latents", "keys"),
        **named("*i32", "query_bounds", "key_bounds", "bounds", "first", "block_tables"),
        **named("*fp32", "log_sums", "part_log_sums"),
        **named("fp32", "scale"),
    }
    types |= named("*i32", "chosen", "bits", "chosen_bits")
    masked, tiles = {"CHOSEN": True}, {"k_tiles": 128, "rest_tiles": 64, "v_tiles": 128}
    for causal, chosen in ((False, {}), (True, {}), (True, masked), (False, masked)):
        described = capability >= 90 and not chosen
        of_tiles = {name: f"tensordesc<bf16[1, 64, {width}]>" for name, width in tiles.items()}
        yield Case(
            ragged_attention.ragged_attention_kernel,
            f"causal={causal} {chosen}",
            {**types, **(of_tiles if described else {})},
            {
                "NUM_HEADS": 16, "KEY": 192, "MAIN": 128, "REST": 64, "VALUE": 128,
                "BLOCK_VALUE": 128, "BLOCK_Q": 128, "TILE": 64, "CAUSAL": causal,
                "PRECISION": "tf32", "LOG_2": 0.7, "DESCRIBED": described,
                **({} if described else dict.fromkeys(tiles)),
                **(chosen or {"CHOSEN": False, "chosen_bits": None}),
            },
            {"num_warps": 8, "num_stages": 3 if has_ample_memory(CPU) else 2},
        )  # fmt: skip
    kernel = chosen_bits.chosen_bits_kernel
    yield Case(kernel, "", types, {"TOP_K": 2048, "BLOCK": 2048}, {"num_warps": 8})
    yield Case(
        merge_attention.merge_attention_kernel,
        "",
        types,
        {"NUM_HEADS": 16, "VALUE": 128, "BLOCK_VALUE": 128},
        {"num_warps": 1},
    )
    yield Case(
        attention_sink.add_sinks_kernel,
        "",
        {**types, "attended": "*bf16", "sinks": "*fp32"},
        {"NUM_HEADS": 64, "VALUE": 64, "BLOCK_VALUE": 64, "ROWS": 64},
    )
    is_fp8 = capability >= 90
    yield Case(
        context_gather.gather_context_kernel,
        f"fp8={is_fp8}",
        {**types, "plane": "*fp8e4nv" if is_fp8 else "*bf16", "scales": "*fp32"},
        {
            "FP8": is_fp8, **({} if is_fp8 else {"scales": None}), "HEAD_DIM": 128,
            "BLOCK_DIM": 128, "BLOCK_SIZE": 64, "TILE": 32,
        },
        {"num_warps": 4},
    )  # fmt: skip
    yield Case(
        latent_gather.gather_latents_kernel,
        f"fp8={is_fp8}",
        {**types, "kv_cache": "*fp8e4nv" if is_fp8 else "*bf16", "kv_scale": "*fp32"},
        {
            "FP8": is_fp8, **({} if is_fp8 else {"kv_scale": None}),
            "NUM_HEADS": 16, "HEADS": 16, "LATENT": 512, "BLOCK_LATENT": 512, "ROPE": 64,
            "BLOCK_ROPE": 64, "BLOCK_SIZE": 64,
        },
        {"num_warps": 2},
    )  # fmt: skip


def linear_attention_cases(capability: int) -> Iterator[Case]:
    names = ("x", "weight", "given", "out", "gate", "mixed", "gates", "changes", "reads")
    types = {**named("*bf16", *names), **named("*fp32", "a_log", "dt_bias", "states")}
    types |= {**named("*i32", "blocks", "query_start_loc", "seq_lens"), "decays": "*bf16"}
    types |= {**named("*i32", "rows", "num_taken"), "kept": "*bf16", "kept_gates": "*bf16"}
    types |= named("fp32", "eps", "scale", "rate_scale")
    shape = {"NUM_KEYS": 16, "NUM_VALUES": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_KEY": 128}
    overlap = {"OVERLAP": capability >= 90}
    taps = {"WIDTH": 4, "WIDTHS": 4, "CHANNELS": causal_conv.CHANNELS}
    for tile in (1, causal_conv.TILE):
        kept = {**types, **named("*bf16", "states", "bias")}
        for has_bias in (False, True):
            constants = {**taps, "TILE": tile, "OVERLAP": tile == 1 and capability >= 90}
            constants |= {"ACTIVATES": has_bias, **({} if has_bias else {"bias": None})}
            yield Case(causal_conv.causal_conv_kernel, f"{tile} {has_bias}", kept, constants)
    few = {"ROWS": 1, "COLS": 8, "DEPTH": 1024, "INNER": 2688, "WIDTH": 4, **overlap}
    kept = {**types, **named("*bf16", "states", "bias", "taps")}
    few_rows = few_row_conv.few_row_conv_kernel
    yield Case(few_rows, "", kept, {**few, "HAS_BIAS": True}, {"num_warps": 2})
    constants = {**taps, "PENDING": 4, "TILE": 8, "bias": None, "ACTIVATES": True, **overlap}
    yield Case(causal_conv.pending_conv_kernel, "4", {**types, "states": "*bf16"}, constants)
    for count, pending in ((1, 0), (256, 0), (1, 4), (256, 4)):
        decode = delta_tuning.decode_tuning(CPU, count)
        part, warps = {"VALUES": decode.values, **overlap}, {"num_warps": decode.num_warps}
        part["PENDING"] = pending
        for by_channel in (False, True):
            part |= {"BY_CHANNEL": by_channel, "FLOOR": -5.0 * by_channel}
            name = f"{count}" + f", {pending} pending" * (pending > 0) + ", channels" * by_channel
            yield Case(delta_rule.delta_rule_kernel, name, types, {**shape, **part}, warps)
    yield from delta_prompt_cases(types, shape)
    for is_sigmoid in (False, True):
        heads = {"NUM_HEADS": 32, "DIM": 128, "BLOCK": 128, "ROWS": gated_rms_norm.ROWS}
        heads |= {"SIGMOID": is_sigmoid, **overlap}
        yield Case(gated_rms_norm.gated_rms_norm_kernel, f"{is_sigmoid}", types, heads)
    for shared in (1, 128):
        gated = {"BLOCK": 1024, "SHARED": shared, "SOFTPLUS": shared > 1, **overlap}
        yield Case(sigmoid_and_mul.gate_and_mul_kernel, f"shared={shared}", types, gated)
    yield Case(row_gate.row_gate_kernel, "", types, {"BLOCK": 2048, **overlap})


def delta_prompt_cases(types: dict[str, str], shape: dict[str, Any]) -> Iterator[Case]:
    types = {
        **types,
        **named("*fp32", "scratch", "scales", "lasts", "totals", "inverses"),
        "scores": "*bf16",
    }
    types |= named("*bf16", "solved", "factors")
    chunk = {**shape, "CHUNK": chunk_systems.CHUNK, "PART": chunk_systems.PART, "FLOOR": 0.0}
    chunk |= {"BLOCK_VALUE": 128, "PRECISION": "tf32"}
    chunk |= {"MIXED_STRIDE": 12_288, "DECAYS_STRIDE": 4096}
    walk, how = delta_tuning.walk_tuning(CPU, 2, 128), delta_tuning.prompt_tuning(CPU)
    ahead = {"num_warps": walk.num_warps, "num_stages": walk.num_stages}
    by_channel = {"NUM_KEYS": 32, "CHANNELS": kda_chunks.CHANNELS}
    for kernel, more, options in (
        (delta_chunks.delta_system_kernel, {}, how.system),
        (delta_chunks.delta_factors_kernel, {}, {"num_warps": how.factors_warps}),
        (kda_parts.kda_parts_kernel, by_channel, {"num_warps": how.parts_warps}),
        (kda_systems.kda_system_kernel, by_channel, {"num_warps": how.channels_warps}),
        (chunk_walk.chunk_walk_kernel, {"BY_CHANNEL": False}, ahead),
        (chunk_walk.chunk_walk_kernel, {**by_channel, "BY_CHANNEL": True, "scales": None}, ahead),
    ):
        columns = (
            chunk_systems.PART if kernel is kda_parts.kda_parts_kernel else chunk_systems.CHUNK
        )
        width = chunk_systems.solver_width(options["num_warps"], columns)
        constants = {**chunk, "WIDTH": width}
        constants |= {"VALUES": walk.values, **more}
        known = {name: value for name, value in constants.items() if name in kernel.arg_names}
        decays = "*fp32" if kernel is chunk_walk.chunk_walk_kernel else "*bf16"
        yield Case(kernel, str(more), {**types, "decays": decays}, known, options)


def mamba_cases(capability: int) -> Iterator[Case]:
    names = "a_log", "dt_bias", "skip", "states", "pieces", "decays", "sizes", "means"
    types = {
        **named("*fp32", *names),
        **named("*i32", "blocks", "query_start_loc", "seq_lens", "rows", "num_taken"),
    }
    types |= named("*bf16", "mixed", "steps", "befores", "out", "x", "gate", "weight", "kept_steps")
    types["eps"] = "fp32"
    overlap = {"OVERLAP": capability >= 90}
    shape = {"NUM_HEADS": 64, "NUM_GROUPS": 8, "SIZE": 128, "HEAD_DIM": 64, "BLOCK_SIZE": 128}
    for count, pending in ((1, 0), (256, 0), (256, 4)):
        decode = mamba_tuning.token_tuning(CPU, count)
        part, warps = {"VALUES": decode.values, **overlap}, {"num_warps": decode.num_warps}
        part["PENDING"] = pending
        name = f"{count}, {pending} pending"
        yield Case(mamba_scan.mamba_scan_kernel, name, types, {**shape, **part}, warps)
    prompts = mamba_tuning.chunk_tuning(CPU)
    tile = {"CHUNK": prompts.chunk, "PRECISION": "tf32", "BLOCK_DIM": 64}
    warps = {"num_warps": prompts.piece_warps}
    yield Case(mamba_chunks.mamba_piece_kernel, "", types, {**shape, **tile}, warps)
    passed = {"NUM_HEADS": 64, "NUMBERS": 8192, "CHUNK": prompts.chunk}
    elements = {"ELEMENTS": mamba_chunks.ELEMENTS}
    yield Case(mamba_chunks.mamba_pass_kernel, "", types, {**passed, **elements})
    heads = {"HEADS": mamba_chunks.heads_at_once(8, prompts.heads)}
    warps = {"num_warps": prompts.num_warps, "num_stages": prompts.num_stages}
    yield Case(mamba_chunks.mamba_chunk_kernel, "", types, {**shape, **tile, **heads}, warps)
    alone = ("means",)
    for label, absent in (
        ("", alone), ("behind", alone), ("sums", (*alone, "weight")), ("shared", ())
    ):  # fmt: skip
        constants = {"GROUPS": 8, "WIDTH": 512, "TILE": 512, "ONLY_SUMS": label == "sums"}
        constants |= {**dict.fromkeys(absent), "BEHIND": label == "behind", **overlap}
        found = {**types, "out": "*fp32"} if label == "sums" else types
        yield Case(gated_group_norm.gated_group_norm_kernel, label, found, constants)


def batch_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*i32", "idx_mapping", "query_start_loc", "token_ids", "num_computed"),
        **named("*i32", "row_max_len", "max_len", "block_table", "out_input_ids", "total_len"),
        **named("*i32", "num_taken"),
        **named("*i64", "out_positions", "out_slot_mapping", "sampled", "drafts"),
        **named("*i32", "out_seq_lens", "out_block_tables", "row_ids", "starts", "cu_lens"),
    }
    yield Case(
        batch_prep.prepare_inputs_kernel,
        "",
        {**types, "max_len": "i32", "addresses": "*i64", "sizes": "*i32"},
        {"CHUNK": batch_prep.CHUNK},
    )
    requests = {"REQUESTS": batch_prep.REQUESTS_PER_PROGRAM}
    for width, has_states in ((1, False), (4, False), (4, True)):
        advanced = {**requests, "WIDTH": width, "OVERLAP": capability >= 90}
        advanced["HAS_STATES"] = has_states
        name = f"{width}" + ", states" * has_states
        yield Case(batch_prep.post_update_kernel, name, types, advanced)
    yield Case(
        batch_prep.write_drafts_kernel,
        "",
        {**types, "max_len": "i32"},
        {**requests, "WIDTH": 3},
    )
    of_rows = {**types, **named("*i64", "found"), "width": "i32"}
    parts = {"PARTS": ngrams.FEWEST_PARTS}
    yield Case(
        ngrams.find_ngrams_kernel,
        "",
        of_rows,
        {**parts, "MIN_LEN": 3, "MAX_LEN": 4, "CHUNK": ngrams.CHUNK},
    )
    yield Case(
        ngrams.read_drafts_kernel,
        "",
        of_rows,
        {**parts, "NUM_DRAFTS": 3, "MAX_DRAFTS": ngrams.MAX_DRAFTS},
    )
    yield Case(
        word_pieces.write_pieces_kernel,
        "",
        {"addresses": "*i64", "packed": "*i32"},
        {"CHUNK": word_pieces.CHUNK},
    )
    yield Case(
        block_copies.block_copies_kernel,
        "i64",
        {**named("*i64", "pages"), **named("*i32", "copies")},
        {"CHUNK": block_copies.CHUNK},
    )


def checksum_cases(capability: int) -> Iterator[Case]:
    types = named("*i64", "addresses", "sizes", "firsts", "table", "sums", "out")
    yield Case(xxh3.block_sums_kernel, "", types, {"ROWS": xxh3.ROWS})
    constants = {"PARTS": xxh3.PARTS, "AHEAD": xxh3.AHEAD}
    yield Case(xxh3.xxh3_chain_kernel, "", types, constants, {"num_warps": 1})


def sampling_cases(capability: int) -> Iterator[Case]:
    floats = ["logits", "temperature", "top_p", "min_p", "floors", "copies", "ranges", "sums"]
    types = {
        **named(
            "*fp32",
            *floats,
            "best_values",
            "repetition",
            "presence",
            "frequency",
            "values",
            "logprobs",
        ),
        **named(
            "*i32",
            "top_k",
            "best_ids",
            "rows",
            "cols",
            "penalty_rows",
            "prompt_mask",
            "drafts",
            "masks",
            "entries",
        ),
        **named("*i64", "seeds", "positions", "sampled", "ids", "ranks", "token_ids"),
        "output_counts": "*i32",
    }
    picked = {"idx_mapping": "*i32", "seq_lens": "*i32", "floats": "*fp32", "out_floats": "*fp32"}
    picked |= {"out_top_k": "*i32", "out_seeds": "*i64", "out_positions": "*i64"}
    turn = {"OVERLAP": capability >= 90}
    sizes = {"NUM_FLOATS": 3, "BLOCK": 128, **turn}
    yield Case(parameters.pick_parameters_kernel, "", {**types, **picked}, sizes)
    block = {"BLOCK": filter_floor.SEARCH_BLOCK, **turn}
    search = {**block, "BLOCKS": 32}
    yield Case(filter_floor.range_kernel, "", types, block, {"num_warps": 8})
    yield Case(filter_floor.weigh_kernel, "", types, search, {"num_warps": 8})
    yield Case(filter_floor.filter_floor_kernel, "", types, search, {"num_warps": 16})
    floors = {"HAS_FLOORS": True}
    stretch = {"BLOCK": 4096, **floors, **turn}
    yield Case(sampling.block_argmax_kernel, "", types, stretch, {"num_warps": 8})
    blocks = {"BLOCKS": 128, "WITH_VALUES": False, **turn}
    yield Case(sampling.row_argmax_kernel, "", types, blocks, {"num_warps": 1})
    pairs = {**types, "sampled": "*fp32", "parts": "*fp32", "chosen": "*i64"}
    blocks = {**blocks, "WITH_VALUES": True}
    yield Case(sampling.row_argmax_kernel, "with values", pairs, blocks, {"num_warps": 1})
    yield Case(sampling.best_of_parts_kernel, "", pairs, {"PARTS": 2}, {"num_warps": 1})
    yield Case(token_masks.mask_logits_kernel, "", types, {"BLOCK": 4096}, {"num_warps": 8})
    yield Case(penalties.add_sparse_kernel, "", types, {"ENTRIES": 256})
    yield Case(penalties.count_tokens_kernel, "", types, {"REQUESTS": 256})
    for num_drafts in (0, 3):
        yield Case(
            penalties.apply_penalties_kernel,
            f"{num_drafts}",
            types,
            {"BLOCK": 4096, "NUM_DRAFTS": num_drafts},
            {"num_warps": 8},
        )
    for dtype in ("fp32", "bf16") if capability >= 90 else ("fp32",):
        yield Case(
            logprobs.logprobs_kernel,
            dtype,
            {**types, "logits": f"*{dtype}"},
            {"BLOCK": 4096, "IDS": 8},
            {"num_warps": 8},
        )


def lora_cases(capability: int) -> Iterator[Case]:
    ints = named("*i32", "row_slots", "idx_mapping", "query_start_loc", "token_slots")
    types = {**ints, "out": "*i32"}
    yield Case(lora_slots.lora_slots_kernel, "", types, {"BLOCK": 256}, {"num_warps": 1})
    overlap = capability >= 90
    pointers = {**ints, **named("*bf16", "x", "a", "b")}
    for rows in (16, 64):
        common = {"PRECISION": "tf32", "ROWS": rows, "OVERLAP": overlap and rows == 16}
        yield Case(
            lora_shrink.lora_shrink_kernel,
            f"{rows}",
            {**pointers, "out": "*fp32"},
            {**common, "COLS": 64, "DEPTH": 128},
            {"num_warps": 4, "num_stages": 3},
        )
        for rank, parts in ((16, 3), (256, 1)) if rows == 64 else ((8, 2),):
            yield Case(
                lora_expand.lora_expand_kernel,
                f"{rows} rank={rank} parts={parts}",
                {**pointers, "shrunk": "*fp32", "out": "*bf16"},
                {
                    **common,
                    "COLS": 64 if rows == 16 else 128,
                    "DEPTH": max(16, min(64, rank)),
                    "RANK": rank,
                    "PARTS": parts,
                },
                {"num_warps": 4, "num_stages": 2},
            )
    few = {**pointers, **named("*bf16", "both", "out"), "shrunk": "*fp32"}
    lanes = {"RANK": 16, "ALL_SLOTS": 8, "SLOTS": 8, "PIECES": 4}
    tiles = {"PRECISION": "tf32", "ROWS": 16, "OVERLAP": overlap}
    for parts in (1, 3):
        yield Case(
            lora_expand_few.lora_expand_few_kernel,
            f"parts={parts}",
            few,
            {**lanes, **tiles, "COLS": 64, "PARTS": parts},
            {"num_warps": 4},
        )
    yield Case(
        lora_expand_few.lora_expand_gated_kernel,
        "",
        few,
        {**lanes, **tiles, "COLS": 32, "GELU": False},
        {"num_warps": 4},
    )
    fused = {**few, **named("*bf16", "x", "weight", "bias"), "counters": "*i32"}
    fused |= named("*fp32", "sums", "parts")
    layers = (3, 6144, 16), (1, 4096, 16), (1, 1024, 256), (2, 14336, 16)
    for parts, num_outputs, rank in layers if overlap else ():
        slots = 8 if rank == 16 else 2
        gated = parts == 2
        tuning = lora_gemm_tuning.lora_gemm_tuning(
            CPU, 16, num_outputs, parts * rank * slots, gated
        )
        yield Case(
            lora_gemm.lora_gemm_kernel,
            f"parts={parts} outputs={num_outputs} rank={rank}",
            fused,
            {
                **tiles,
                "PARTS": parts,
                "RANK": rank,
                "SLOTS": slots,
                "PIECES": 4,
                "SPLITS": tuning.splits,
                "COLS": tuning.cols,
                "DEPTH": tuning.depth,
                "AHEAD": tuning.ahead,
                "AT_ONCE": lora_lanes.slots_at_once(slots, rank),
                "GATED": gated,
                "GELU": False,
                "HAS_BIAS": False,
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )


def collective_cases(capability: int) -> Iterator[Case]:
    types_of_ranks = {"addresses": "*i64", "eps": "fp32"}
    types = {**named("*bf16", "x", "out", "residual", "weight"), **types_of_ranks}
    common = peer_memory.RankMemories(torch.zeros(4), 1, 1 << 20).constants
    tuning = peer_reduce.reduce_tuning(1 << 20)
    for two_shot in (False, True) if capability >= 90 else (True,):
        constants = {**common, "TWO_SHOT": two_shot, "SIZE": tuning.size}
        options = {"num_warps": tuning.num_warps}
        kernel = peer_reduce.peer_reduce_kernel
        yield Case(kernel, f"two_shot={two_shot}", types, constants, options)
        constants |= {"SIZE": 4096, "OVERLAP": capability >= 90}
        kernel = peer_reduce_norm.peer_reduce_norm_kernel
        yield Case(kernel, f"two_shot={two_shot}", types, constants, {"num_warps": 8})
    constants = {**common, "SIZE": tuning.size}
    kernel = peer_exchange.peer_scatter_kernel
    yield Case(kernel, "", types, constants, {"num_warps": tuning.num_warps})
    types = {**named("*i32", "x", "out"), **named("*i64", "slots", "slots_out"), **types_of_ranks}
    kernel = peer_exchange.peer_gather_kernel
    yield Case(kernel, "", types, constants, {"num_warps": tuning.num_warps})


def sparse_cases(capability: int) -> Iterator[Case]:
    """Yields cases of the indexer, whose keys are float32 or e4m3, and of attention to chosen
    tokens."""
    fp8 = capability >= 90
    types = {
        **named("*bf16", "q", "k"),
        **named("*fp32", "norm_weight", "norm_bias", "head_weights", "weights", "cos_sin_cache"),
        **named("*fp32", "scales", "key_scales", "scores", "kv_scale", "state"),
        **named("*i32", "block_tables", "query_start_loc", "seq_lens", "chosen"),
        **named("*i64", "positions", "slot_mapping"),
        **named("fp32", "scale", "eps"),
    }
    heads = {"NUM_HEADS": 64, "D": 128, "BLOCK_SIZE": 64}
    for rounds in (False, True):
        stored = named("*u8" if rounds else "*fp32", "keys", "queries")
        yield Case(
            index_rope_and_cache.index_rope_and_cache_kernel,
            f"fp8={rounds}",
            {**types, **stored},
            {**heads, "ROWS": 16, "ROPE": 64, "NORM": 128**-0.5, "FP8": rounds},
        )
    stored = named("*fp8e4nv" if fp8 else "*fp32", "q", "keys")
    for query_len, block_q in ((1, 1), (0, 4)):
        shape = {"TOP_K": 2048, "QUERY_LEN": query_len, "BLOCK_Q": block_q, "TOKENS": 1}
        yield Case(
            index_topk.index_scores_kernel,
            f"query_len={query_len} fp8={fp8}",
            {**types, **stored},
            {
                **shape,
                **heads,
                "HEADS": 64,
                "TILE": 64,
                "PRECISION": "tf32",
                "FP8": fp8,
            },
            {"num_warps": 4, "num_stages": 4 if fp8 else 1},
        )
        types |= named("*i32", "candidates", "found")
        constants = {**shape, "CANDIDATES": 4096, "BLOCK": 2048}
        options = {"num_warps": 8, "maxnreg": index_select.REGISTERS}
        select = index_select.select_kernel
        yield Case(select, f"query_len={query_len}", types, constants, options)
        constants["PARTS"] = 32
        for kernel in (index_select.gather_part_kernel, index_select.select_part_kernel):
            if query_len:
                yield Case(kernel, "", types, constants, options)
    yield Case(
        chosen_slots.slots_kernel,
        "",
        {**types, "slots": "*i32"},
        {"TOP_K": 2048, "QUERY_LEN": 1, "BLOCK_SIZE": 64, "BLOCK": 1024},
    )
    for num_heads, splits, is_fp8 in ((16, 4, False), (128, 1, False), (128, 1, fp8)):
        tuning = sparse_latent_attention.sparse_tuning(CPU, num_heads, 2)
        yield Case(
            sparse_latent_attention.sparse_latent_kernel,
            f"heads={num_heads} splits={splits} fp8={is_fp8}",
            {
                **types,
                **named("*bf16", "q_latent", "q_rope"),
                "slots": "*i32",
                "kv_cache": "*fp8e4nv" if is_fp8 else "*bf16",
                "out": "*fp32" if splits > 1 else "*bf16",
            },
            {
                "TOP_K": 2048,
                "QUERY_LEN": 1,
                "NUM_HEADS": num_heads,
                "ROWS": tuning.rows,
                "LATENT": 512,
                "BLOCK_LATENT": 512,
                "ROPE": 64,
                "BLOCK_ROPE": 64,
                "BLOCK_SIZE": 64,
                "TILE": tuning.tile,
                "SPLITS": splits,
                "PRECISION": "tf32",
                "FP8": is_fp8,
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )


def sparse_ahead_cases(capability: int) -> Iterator[Case]:
    """Yields what Hopper runs of the indexer, and of attention to chosen tokens."""
    shapes = ((1, 1, 64), (0, 4, 64), (0, 4, 16)) if capability == 90 else ()
    for query_len, block_q, block_size in shapes:
        yield Case(
            index_scores_ahead.index_scores_ahead_kernel,
            f"query_len={query_len} block_size={block_size}",
            {
                **named("*fp8e4nv", "q", "keys"),
                **named("*fp32", "head_weights", "key_scales", "scores"),
                **named("*i32", "block_tables", "query_start_loc", "seq_lens"),
            },
            {
                "NUM_HEADS": 64, "HEADS": 64, "D": 128, "TOP_K": 2048, "BLOCK_SIZE": block_size,
                "TILE": 64, "QUERY_LEN": query_len, "BLOCK_Q": block_q, "TOKENS": 1,
                "STAGES": index_topk.STAGES_AHEAD, "num_warps": 4,
            },
            {"num_warps": 4},
        )  # fmt: skip
    for parts, block in ((1, 2048), (32, 64)) if capability == 90 else ():
        yield Case(
            index_candidates.gather_candidates_kernel,
            f"parts={parts} block={block}",
            {"scores": "*fp32", **named("*i32", "query_start_loc", "seq_lens"),
             **named("*i32", "candidates", "found")},
            {
                "TOP_K": 2048, "CANDIDATES": 4096, "BLOCK": block, "QUERY_LEN": 0, "BLOCK_Q": 4,
                "TOKENS": 1, "PARTS": parts, "num_warps": 8,
            },
            {"num_warps": 8, "maxnreg": index_select.REGISTERS},
        )  # fmt: skip
    for num_heads, splits in ((16, 1), (128, 1), (128, 4)) if capability == 90 else ():
        tuning = sparse_latent_attention.sparse_tuning(CPU, num_heads, 2, is_ahead=True)
        few, many = sparse_latents_ahead, sparse_latents_pieces
        yield Case(
            many.sparse_pieces_kernel if num_heads > 16 else few.sparse_ahead_kernel,
            f"heads={num_heads} splits={splits}",
            {
                **named("*bf16", "q_latent", "q_rope", "kv_cache"),
                **named("*i32", "slots", "query_start_loc", "seq_lens"),
                "out": "*fp32" if splits > 1 else "*bf16",
                "state": "*fp32",
                "scale": "fp32",
            },
            {
                "TOP_K": 2048, "QUERY_LEN": 0, "NUM_HEADS": num_heads, "ROWS": tuning.rows,
                "LATENT": 512, "ROPE": 64, "BLOCK_SIZE": 64, "TILE": tuning.tile,
                "SPLITS": splits, "TILES": num_heads // tuning.rows,
                "num_warps": tuning.num_warps,
            },
            {"num_warps": tuning.num_warps},
        )  # fmt: skip


def token_row_cases(capability: int) -> Iterator[Case]:
    """Yields DeepSeek-V4's windows beside rows of 4 and of 128 tokens."""
    types = {
        **named("*bf16", "q", "kv", "pages", "row_pages"),
        **named("*fp32", "weight", "cos_sin_cache", "bias", "sinks", "state", "head_weights"),
        **named("*fp32", "k", "weights", "scales"),
        **named("*i32", "block_tables", "row_tables", "chosen", "query_start_loc", "seq_lens"),
        **named("*i64", "positions", "slot_mapping"),
        **named("fp32", "eps", "scale"),
    }
    overlap = {"OVERLAP": capability >= 90}
    turn = {"NUM_HEADS": 64, "ROWS": 8, "D": 512, "ROPE": 64, **overlap}
    plain = {"NARROW_ROPE": 0, "EXPONENTS": 0, "rotated": None, "exponents": None}
    narrow = {"NARROW_ROPE": 64, "EXPONENTS": 8}
    in_bytes = {**types, **named("*u8", "pages", "numbers", "exponents"), "rotated": "*bf16"}
    for label, kinds, how in (("", types, plain), ("narrow", in_bytes, narrow)):
        yield Case(
            shared_rope_and_cache.shared_rope_and_cache_kernel,
            label,
            kinds,
            {**turn, **how, "BLOCK_SIZE": 64},
        )
    yield Case(
        row_cache.cache_narrow_rows_kernel,
        "",
        {**in_bytes, "x": "*fp32"},
        {"DIM": 512, "ROPE": 64, "EXPONENTS": 8, "BLOCK_SIZE": 64, **overlap},
    )
    back = attended_rows.rotate_back_kernel
    yield Case(back, "", {**types, "x": "*bf16"}, {**turn, "ROWS": 32})
    for splits, group in ((32, 128), (1, 128), (32, 0)):
        if group == 0 or capability >= 89:
            yield Case(
                attended_rows.attended_rows_kernel,
                f"splits={splits} group={group}",
                {
                    **types, "parts": "*fp32" if splits > 1 else "*bf16",
                    "out": "*fp8e4nv" if group else "*bf16",
                },
                {
                    "NUM_HEADS": 64, "D": 512, "ROPE": 64, "WIDTH": 128, "SPLITS": splits,
                    "QUANTISE": group > 0,
                    **overlap, **({} if group else {"scales": None}),
                    **({} if splits > 1 else {"state": None}),
                },
            )  # fmt: skip
    for tokens, series in ((4, 2), (128, 1)):
        yield Case(
            close_rows.close_rows_kernel,
            f"tokens={tokens}",
            {**types, **named("*fp32", "x", "pages", "out")},
            {
                "QUERY_LEN": 1, "TOKENS": tokens, "SERIES": series, "FIRST": 0, "D": 512,
                "ROPE": 64, "WIDTH": 1024 * series, "BLOCK_SIZE": 16, "TILE": min(8, tokens),
                **overlap,
            },
        )  # fmt: skip
    yield Case(
        closed_slots.closed_slots_kernel,
        "",
        {**types, "out": "*i64"},
        {"TOKENS": 4, "BLOCK": 256, **overlap},
    )
    yield Case(
        closed_slots.placed_ids_kernel,
        "",
        {**types, "out": "*i64", "input_ids": "*i32"},
        {"BLOCK": 256, **overlap},
    )
    yield Case(
        row_cache.cache_rows_kernel,
        "",
        {**types, "x": "*fp32"},
        {"WIDTH": 512, "BLOCK_SIZE": 64, "BLOCK": 512, **overlap},
    )
    for rounds in (False, True):
        yield Case(
            index_rows.index_rows_kernel,
            f"fp8={rounds}",
            {**types, **named("*u8" if rounds else "*fp32", "keys", "queries")},
            {
                "NUM_HEADS": 64, "ROWS": 64 if rounds else 16, "D": 128, "ROPE": 64,
                "BLOCK_SIZE": 64, "NORM": 128**-0.5, "FP8": rounds, **overlap,
            },
        )  # fmt: skip
    plain |= {"row_rotated": None, "row_exponents": None, "NARROW_SPAN": 0}
    narrow |= {"NARROW_SPAN": 64}
    of_narrow = {
        **types, **named("*fp8e4nv", "pages", "row_pages"),
        **named("*bf16", "rotated", "row_rotated"), **named("*u8", "exponents", "row_exponents"),
    }  # fmt: skip
    cases = [(types, plain, *case) for case in ((64, 1, 4, 512), (8, 8, 128, 0), (64, 4, 0, 0))]
    if capability >= 89:
        cases += [(of_narrow, narrow, 64, 1, 4, 512), (of_narrow, narrow, 8, 8, 128, 0)]
    for kinds, how, heads, splits, tokens, top_k in cases:
        queries = torch.empty(1 if splits > 1 else 64, heads, 512, dtype=torch.bfloat16)
        tuning = window_rows_attention.window_rows_tuning(queries, False)
        yield Case(
            window_rows_attention.window_rows_kernel,
            f"heads={heads} splits={splits} tokens={tokens} narrow={how is narrow}",
            {**kinds, "out": "*fp32" if splits > 1 else "*bf16"},
            {
                **how,
                "WINDOW": 128, "TOKENS": tokens, "TOP_K": top_k, "QUERY_LEN": 1,
                "NUM_HEADS": heads, "ROWS": tuning.rows, "LATENT": 512, "BLOCK_LATENT": 512,
                "BLOCK_SIZE": 64, "ROW_BLOCK_SIZE": 64, "TILE": tuning.tile, "SPLITS": splits,
                "PRECISION": "tf32", **({} if top_k else {"chosen": None}),
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )  # fmt: skip
    if capability == 90:
        for tokens, top_k in ((0, 0), (4, 512), (128, 0)):
            yield Case(
                window_rows_ahead.window_rows_ahead_kernel,
                f"tokens={tokens}",
                {**types, "out": "*bf16"},
                {
                    "WINDOW": 128, "TOKENS": tokens, "TOP_K": top_k, "QUERY_LEN": 0,
                    "NUM_HEADS": 64, "ROWS": 64, "LATENT": 512, "BLOCK_SIZE": 64,
                    "ROW_BLOCK_SIZE": 64, "TILE": 64, "TILES": 1, "ROPE": 64, "num_warps": 8,
                },
                {"num_warps": 8},
            )  # fmt: skip


def stream_cases(capability: int) -> Iterator[Case]:
    types = {
        **named("*bf16", "x", "streams", "out"),
        **named("*fp32", "fn", "logits", "squares", "base", "scale", "post", "comb"),
        **named("fp32", "eps", "norm_eps"),
    }
    for outputs, lanes, rows in ((24, 32, 16), (24, 32, 64), (4, 16, 16)):
        yield Case(
            streams.stream_logits_kernel,
            f"outputs={outputs}, rows={rows}",
            types,
            {
                "OUTPUTS": outputs, "LANES": lanes, "ROWS": rows, "DEPTH": 128,
                "PRECISION": "tf32x3" if rows == 16 else "tf32",
            },
            {"num_warps": 4, "num_stages": 3},
        )  # fmt: skip
    for outputs in (24, 4):
        yield Case(
            streams.read_streams_kernel,
            f"outputs={outputs}",
            types,
            {
                "COUNT": 4, "OUTPUTS": outputs, "ITERATIONS": 20, "SPLITS": 32, "BLOCK": 1024,
                **({} if outputs > 4 else {"post": None, "comb": None}),
            },
        )  # fmt: skip
    yield Case(streams.write_streams_kernel, "", types, {"COUNT": 4, "BLOCK": 512})
    types |= {**named("*bf16", "beside", "weight"), "row_eps": "fp32"}
    for outputs, lanes, rows in ((24, 32, 64), (4, 16, 64), (24, 32, 16)):
        yield Case(
            mix_many.mix_many_kernel,
            f"outputs={outputs}, rows={rows}",
            types,
            {
                "OUTPUTS": outputs, "LANES": lanes, "ROWS": rows, "COLUMNS": 32, "MIXES": True,
                "HAS_BESIDE": True, "PRECISION": "tf32", "IN_PAIRS": True,
            },
            {"num_warps": 8, "num_stages": 4} if rows == 64 else {"num_warps": 2, "num_stages": 1},
        )  # fmt: skip
    turn = {"OVERLAP": capability >= 90}
    for outputs, lanes, columns in ((24, 32, 32), (24, 32, 64), (4, 4, 32)):
        yield Case(
            enter_streams.mix_streams_kernel,
            f"outputs={outputs}, columns={columns}",
            types,
            {
                "COUNT": 4, "OUTPUTS": outputs, "LANES": lanes, "COLUMNS": columns,
                "MIXES": True, "HAS_BESIDE": True, **turn,
            },
            {"num_warps": columns // 8},
        )  # fmt: skip
    for outputs in (24, 4):
        yield Case(
            enter_streams.norm_streams_kernel,
            f"outputs={outputs}",
            types,
            {
                "COUNT": 4, "OUTPUTS": outputs, "SPLITS": 128, "BLOCK": 4096, **turn,
            },
            {"num_warps": 8},
        )  # fmt: skip
    shares = {"COUNT": 4, "ITERATIONS": 20, "SPLITS": 128, **turn}
    yield Case(enter_streams.share_streams_kernel, "", types, shares)
    types = {**named("*bf16", "blocks", "last", "query", "weight", "out"), "eps": "fp32"}
    yield Case(block_mix.mix_blocks_kernel, "", types, {"BLOCK": 8192}, {"num_warps": 8})


def block_sparse_cases(capability: int) -> Iterator[Case]:
    """Yields cases of blocks of 128 that are chosen for each of four KV heads."""
    fp8 = capability >= 90
    types = {
        "q": "*bf16",
        "keys": "*bf16",
        **named("*fp32", "scores", "k_scale", "v_scale", "state"),
        **named("*i32", "block_tables", "query_start_loc", "seq_lens", "chosen"),
        "scale": "fp32",
    }
    for query_len, block_q in ((1, 4), (0, 16)):
        shape = {"TOP_K": 16, "SIZE": 128, "QUERY_LEN": query_len, "BLOCK_Q": block_q, "GROUPS": 4}
        yield Case(
            block_scores.block_scores_kernel,
            f"query_len={query_len}",
            types,
            {
                **shape,
                "GROUP_LANES": 4,
                "D": 128,
                "LOCAL": 1,
                "BLOCK_SIZE": 16,
                "PRECISION": "tf32",
            },
            {"num_warps": 4, "num_stages": 3},
        )
        constants = {**shape, "TOP_LANES": 16, "WIDTH": 1024}
        choose = block_scores.choose_blocks_kernel
        yield Case(choose, f"query_len={query_len}", types, constants, {"num_warps": 4})
    tuning = block_sparse_attention.block_sparse_tuning(CPU, 128, 2)
    for splits, is_fp8, page in ((4, False, 16), (1, fp8, 64)):
        yield Case(
            block_sparse_attention.block_sparse_kernel,
            f"splits={splits} fp8={is_fp8}",
            {
                **types,
                "kv_cache": "*fp8e4nv" if is_fp8 else "*bf16",
                "out": "*fp32" if splits > 1 else "*bf16",
            },
            {
                "TOP_K": 16, "SIZE": 128, "QUERY_LEN": 1, "NUM_KV_HEADS": 4, "GROUP": 16,
                "ROWS": 16, "HEAD_DIM": 128, "BLOCK_DIM": 128, "VALUE_DIM": 128,
                "BLOCK_VALUE": 128, "BLOCK_SIZE": page, "TILE": tuning.tile, "SPLITS": splits,
                "PRECISION": "tf32", "FP8": is_fp8,
            },
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )  # fmt: skip


def small_memory_cases(capability: int) -> Iterator[Case]:
    """Yields cases as GPUs choose whose programs can have 99 KiB."""
    if capability >= 90:
        return
    gpu = GpuFacts("NVIDIA_L40S", (8, 9), 142, 99 * 1024)
    with as_on(gpu):
        cases = [*attention_cases(capability), *latent_cases(capability), *ragged_cases(capability)]
        cases += small_m_cases(capability)
    yield from (replace(case, most_shared=gpu.shared_bytes) for case in cases)


def cases_of(capability: int) -> Iterator[Case]:
    makers = [
        elementwise_cases,
        small_m_cases,
        small_m_qkv_cases,
        few_row_cases,
        fp8_cases,
        fused_gate_up_cases,
        fused_qkv_cases,
        int4_cases,
        int8_cases,
        int8_weight_cases,
        fp4_cases,
        invariant_cases,
        rope_cases,
        attention_cases,
        expert_cases,
        one_row_expert_cases,
        fp8_expert_cases,
        fp8_pair_cases,
        fp8_ahead_cases,
        fp4_expert_cases,
        fp4_even_cases,
        fp4_few_row_cases,
        fp4_expert_ahead_cases,
        fp4_pair_cases,
        fp4_one_row_cases,
        normed_router_cases,
        latent_cases,
        sparse_cases,
        sparse_ahead_cases,
        token_row_cases,
        stream_cases,
        block_sparse_cases,
        ragged_cases,
        linear_attention_cases,
        mamba_cases,
        batch_cases,
        checksum_cases,
        lora_cases,
        sampling_cases,
        collective_cases,
        small_memory_cases,
    ]
    return itertools.chain.from_iterable(make(capability) for make in makers)


def compile_one(capability: int, case: Case) -> None:
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(case.source(), target=target, options=case.options)
    assert compiled.asm["cubin"]
    shared = compiled.metadata.shared
    assert shared <= (case.most_shared or SHARED_BYTES[capability]), (case.label, shared)
    check_order(case, compiled.asm["ptx"])
    check_registers(case, compiled.asm["ptx"], compiled.asm["cubin"])
    check_spills(case, compiled.asm["cubin"])
    check_rounds(case, compiled.asm["cubin"])
    # One piece, since others write, too.
    sys.stdout.write(f"{capability} | {case.kernel.__name__} {case.label} | {shared}\n")
    sys.stdout.flush()


def compile_next(cases: list[tuple[int, Case]], turns: int) -> None:
    """Compiles cases until the pipe `turns` gives no more places in their list."""
    while turn := os.read(turns, TURN_BYTES):
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        compile_one(*cases[int.from_bytes(turn)])


def main(capabilities: list[int]) -> int:
    """Returns 1 if a case has failed. Processes, one a processor, take one case after the other."""
    cases = [(capability, case) for capability in capabilities for case in cases_of(capability)]
    gc.freeze()  # It would look at torch again and again: a twentieth of the time.
    turns, given = os.pipe()
    os.write(given, b"".join(place.to_bytes(TURN_BYTES) for place in range(len(cases))))
    os.close(given)
    parent, children = os.getpid(), []
    for _ in os.sched_getaffinity(0):
        children.append(os.fork())
        if children[-1] == 0:
            die_with_parent(parent)
            try:
                compile_next(cases, turns)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    return int(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    sys.exit(main([int(capability) for capability in sys.argv[1:]]))
