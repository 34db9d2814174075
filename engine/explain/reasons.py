"""Says why a launch is what it is: the thresholds of `GemmPolicy`, and what else decides."""

from __future__ import annotations

from torch import Tensor

from engine.explain.launches import LIBRARY, Launch
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.plain.small_m import fills_once
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.gemm import small_m_shapes
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds


def reason(launch: Launch, policy: GemmPolicy) -> str:
    """Returns the rule in words, with the number that it has on this device."""
    if launch.name == LIBRARY:
        return _of_library(launch, policy)
    if launch.name == "paged_attention":
        return _of_paged(*launch.arguments[:3])
    if launch.name in OF_STATES:
        return _of_states(launch.arguments[OF_STATES[launch.name]])
    rule = RULES.get(launch.name)
    if rule is None:
        return ""
    text, field = rule
    if field == "small_m_rows" and fills_once(launch.arguments[1], gated=launch.is_gated):
        text, field = (
            "rows {rows} <= small_m_wide_rows {limit}, tiles for all SMs",
            "small_m_wide_rows",
        )
    limit = getattr(policy, field) if field else None
    return text.format(rows=launch.num_rows, limit=limit)


def _of_paged(q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> str:
    from tandem_kernels.attention.paged_attention import kernel_of_decode

    if metadata.fixed_order:
        return "deterministic: one kernel and one tile for all queries"
    if metadata.num_decodes == 0:
        return "a prompt that no library attends: short, recorded, or seen through a window"
    kernel = kernel_of_decode(q, kv_cache, metadata)
    if kernel == "window":
        return "a window whose keys fit into registers (window_attention.py)"
    if kernel == "prefill":
        return "drafts, or a small window whose keys do not fit into registers"
    return "decodes over whole contexts, which are cut into runs for all SMs"


OF_STATES = {"gated_delta_rule": 5, "mamba_scan": 6}
"""Which argument is the metadata of operations on states. Lightning attention is a `mamba_scan`."""


def _of_states(metadata: StateMetadata) -> str:
    if metadata.num_decodes == len(metadata.seq_lens):
        return "decodes: token by token, the columns of a state shared out among programs"
    return "prompts in chunks of 64 tokens, whose products are matrix products; decodes by token"


def _of_library(launch: Launch, policy: GemmPolicy) -> str:
    most, num_rows = max(policy.small_m_rows, policy.few_rows), launch.num_rows
    if most == 0:
        return "no kernel of our own for plain weights on this device"
    if num_rows > most:
        return f"rows {num_rows} > small_m_rows and few_rows {most}: the library is faster"
    x, weight = launch.arguments[:2]
    if weight.dim() != 2:
        return "one product for each head"
    if small_m_shapes.takes(x, weight):
        return "whole tiles of a row layer, or of the head: the library is faster (few_rows.py)"
    most = gemm_thresholds(x.device).many_outputs
    if len(weight) > most:
        return f"rows {num_rows} of more than {most} outputs: they keep the library busy"
    return "sizes that no kernel of our own takes"


RULES: dict[str, tuple[str, str]] = {
    "small_m_gemm": ("rows {rows} <= small_m_rows {limit}, whole tiles", "small_m_rows"),
    "small_m_gate_up": ("rows {rows} <= small_m_rows {limit}, whole tiles", "small_m_rows"),
    "small_m_qkv": ("rows {rows} <= small_m_heads {limit}, whole tiles", "small_m_heads"),
    "few_row_gemm": ("rows {rows} <= few_rows {limit}, sizes that small_m leaves", "few_rows"),
    "head_gemm": ("rows {rows} are few, one product for each head", ""),
    "few_row_conv": ("few rows of plain weights, and the convolution behind them", "few_rows"),
    "few_row_qkv": ("rows {rows} <= few_row_heads {limit}", "few_row_heads"),
    "fused_qkv": ("rows {rows} >= fused_qkv_rows {limit}", "fused_qkv_rows"),
    "fused_gate_up": ("rows {rows} >= fused_gate_up_rows {limit}", "fused_gate_up_rows"),
    "int4_gemm": ("rows {rows} <= int4_rows {limit}", "int4_rows"),
    "int4_gate_up": ("rows {rows} <= int4_rows {limit}", "int4_rows"),
    "fp4_gemm": ("rows {rows} <= fp4_rows {limit}", "fp4_rows"),
    "fp4_gate_up": ("rows {rows} <= fp4_rows {limit}", "fp4_rows"),
    "int4_dequantise": ("rows {rows} > int4_rows {limit}: written out first", "int4_rows"),
    "fp4_dequantise": ("rows {rows} > fp4_rows {limit}: written out first", "fp4_rows"),
    "int8_gemm": ("INT8 weights and rows, as the checkpoint says (int8_linear.py)", ""),
    "int8_gate_up": ("INT8 weights and rows, as the checkpoint says (int8_linear.py)", ""),
    "int8_weight_gemm": ("rows {rows} <= int8_rows {limit}", "int8_rows"),
    "int8_weight_gate_up": ("rows {rows} <= int8_rows {limit}", "int8_rows"),
    "int8_dequantise": ("rows {rows} > int8_rows {limit}: written out first", "int8_rows"),
    "fp4_routed_experts": (
        "rows {rows} <= fused_router_rows {limit}, and the table has each pair by itself",
        "fused_router_rows",
    ),
    "normed_router": ("rows {rows} <= fused_router_rows {limit}", "fused_router_rows"),
    "fp8_gemm": ("FP8 weights, and the device multiplies FP8 (fp8_paths.py)", ""),
    "fp8_gate_up": ("FP8 weights of few rows (fp8_paths.py)", ""),
    "fp8_group_gemm": ("FP8 weights of each group of heads, and few rows (fp8_paths.py)", ""),
    "fp8_dequantise": ("FP8 weights of each group of heads, and many rows: written out", ""),
    "fp8_product": ("FP8 weights; what reads the product applies the scales", ""),
    "invariant_gemm": ("deterministic: a row does not depend on the others", ""),
    "latent_attention": ("latents as they lie in the cache: absorbed", ""),
    "index_topk": (
        "scores of all keys that {rows} tokens see, of which the highest are chosen",
        "",
    ),
    "sparse_latent_attention": ("the chosen tokens' latents, in parts where programs are few", ""),
    "window_rows_attention": ("a window's tokens and rows of several, by one softmax", ""),
    "window_rows_fp8": ("the same, quantised for the output's first projection", ""),
    "choose_blocks": ("scores of whole blocks, of which each KV head chooses its own", ""),
    "block_sparse_attention": ("the blocks that each KV head has chosen", ""),
    "chosen_bits": ("chosen tokens of prompts that are expanded and masked", ""),
    "ragged_attention": ("expanded latents of long prompts", ""),
    "FlashAttention 3": ("long prompts: faster than our kernel (selection.py)", ""),
    "cuDNN": ("long uncached prompts, without FlashAttention 3 (selection.py)", ""),
    "fused_experts": ("experts in the model's own dtype", ""),
    "experts_beside": (
        "rows {rows} <= fused_router_rows {limit}, a shared expert in the same launches",
        "fused_router_rows",
    ),
    "fp8_experts": ("experts stay FP8 where instructions convert it", ""),
    "fp4_experts": ("experts stay four-bit floats where halves are multiplied", ""),
    "int4_experts": ("experts stay packed integers where halves are multiplied", ""),
    "int8_experts": ("experts stay INT8", ""),
}
