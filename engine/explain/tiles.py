"""Names the kernels and tiles of a launch, by the functions that the launchers themselves ask.

Kernels' modules import triton, so this does where a GPU is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.explain import expert_tiles
from engine.explain.expert_tiles import fields_of
from engine.explain.launches import Launch
from engine.explain.reasons import OF_STATES
from engine.layers.methods.plain.small_m import outputs_of
from tandem_kernels.attention.kv_pages import PagedKV, sizes_of


def describe(launch: Launch) -> tuple[str, str]:
    """Returns the kernels of a launch and their tiles; tiles that do not depend on shapes are
    left to the kernel's file."""
    known = _KNOWN.get(launch.name)
    if known is None:
        return launch.name, ""
    return known(*launch.arguments)


def _paged(q: Tensor, kv_cache: PagedKV, metadata: Any, *rest: Any) -> tuple[str, str]:
    from tandem_kernels.attention.decode_merge import FEW_UNITS
    from tandem_kernels.attention.decode_tuning import decode_tuning
    from tandem_kernels.attention.paged_attention import kernel_of_decode
    from tandem_kernels.attention.prefill_attention import tuning_of
    from tandem_kernels.attention.prefill_tuning import fixed_tuning

    kernels, tiles, heads = [], [], sizes_of(kv_cache).num_kv_heads
    decodes, requests = metadata.num_decodes, len(metadata.seq_lens)
    kind = kernel_of_decode(q, kv_cache, metadata) if decodes else "prefill"
    if kind == "window":
        kernels.append("window_attention_kernel")
        tiles.append(f"the window of {metadata.window} at once, {decodes} x {heads}")
    elif kind == "decode":
        tuning = decode_tuning(q.device, decodes * heads, q.shape[-1], kv_cache.dtype)
        kernels.append("decode_attention_kernel")
        if decodes * heads <= FEW_UNITS:
            kernels[-1] += ", merge_kernel"
        tiles.append(fields_of(tuning, "tile", "num_warps", "num_stages", "programs_per_sm"))
    if kind == "prefill" or decodes < requests:
        fixed = metadata.fixed_order
        long = fixed_tuning(q.shape[-1], q.dtype) if fixed else tuning_of(q, kv_cache, metadata)
        kernels.append("prefill_attention_kernel")
        tiles.append(fields_of(long, "rows", "tile", "num_warps", "num_stages"))
    return "; ".join(kernels), "; ".join(tiles)


def _latent(q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: Any, scale: float,
            kv_scales: Any = None) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.attention.latent_attention import latent_tuning
    from tandem_kernels.attention.latent_decode import kernel_of, tuning_of

    if metadata.num_decodes and not metadata.fixed_order:
        tuning = tuning_of(q_latent, q_rope, cache, metadata, kv_scales)
        kernel = kernel_of(tuning).__name__
        return f"{kernel}, merge_kernel", fields_of(tuning, *_OF_HEADS)
    long = latent_tuning(q_latent.device, q_latent.element_size())
    return "latent_attention_kernel", fields_of(long, "rows", "tile", "num_warps", "num_stages")


_OF_HEADS = "rows", "tile", "num_warps", "num_stages"
"""Fields of kernels whose programs share the heads of a token."""


def _sparse_latents(q_latent: Tensor, q_rope: Tensor, cache: Tensor, chosen: Tensor, metadata: Any,
                    scale: float, kv_scales: Any = None) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.attention import sparse_latent_attention as sparse

    is_ahead, heads = sparse.copies_ahead(q_latent, q_rope, metadata, kv_scales), q_latent.shape[1]
    tuning = sparse.sparse_tuning(
        q_latent.device, heads, q_latent.element_size(), is_ahead=is_ahead
    )
    kernel = sparse.kernel_of_copies_ahead(heads) if is_ahead else sparse.sparse_latent_kernel
    return kernel.__name__, fields_of(tuning, *_OF_HEADS)


def _index(q: Tensor, head_weights: Tensor, pages: Any, *rest: Any) -> tuple[str, str]:
    from tandem_kernels.attention.index_topk import copies_ahead

    kernel = "index_scores_ahead_kernel" if copies_ahead(q, pages) else "index_scores_kernel"
    return f"{kernel}, select kernels", ""


def _window_rows(q: Tensor, pages: Any, metadata: Any, *rest: Any) -> tuple[str, str]:
    from tandem_kernels.attention.window_rows_attention import AHEAD, window_rows_tuning
    from tandem_kernels.attention.window_rows_shapes import attends_ahead

    if attends_ahead(q, pages, metadata):
        return "window_rows_ahead_kernel", fields_of(AHEAD, *_OF_HEADS)
    tuning = window_rows_tuning(q, metadata.fixed_order)
    return "window_rows_kernel", fields_of(tuning, *_OF_HEADS)


def _of_blocks(q: Tensor, kv_cache: PagedKV, chosen: Tensor, metadata: Any, choice: Any,
               *rest: Any) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.attention.block_sparse_attention import block_sparse_tuning

    tuning = block_sparse_tuning(q.device, choice.size, q.element_size())
    return "block_sparse_kernel", fields_of(tuning, "tile", "num_warps", "num_stages")


def _delta(*arguments: Any) -> tuple[str, str]:
    from tandem_kernels.linear_attention.delta_tuning import (
        decode_tuning,
        prompt_tuning,
        walk_tuning,
    )

    def of_prompts(device: torch.device) -> str:
        mixed, key_dim = arguments[0], arguments[4].shape[-2]
        walk = walk_tuning(device, mixed.element_size(), max(16, 1 << (key_dim - 1).bit_length()))
        system = fields_of(prompt_tuning(device), "system_warps", "system_registers")
        return f"{system}, walk {fields_of(walk, 'values', 'num_warps', 'num_stages')}"

    return _of_states("gated_delta_rule", "delta_rule_kernel", decode_tuning, of_prompts, arguments)


def _mamba(*arguments: Any) -> tuple[str, str]:
    from tandem_kernels.linear_attention.mamba_tuning import chunk_tuning, token_tuning

    def of_prompts(device: torch.device) -> str:
        return fields_of(chunk_tuning(device), "chunk", "heads", "num_warps", "num_stages")

    return _of_states("mamba_scan", "mamba_scan_kernel", token_tuning, of_prompts, arguments)


def _of_states(
    name: str,
    by_token: str,
    of_decodes: Callable[[torch.device, int], Any],
    of_prompts: Callable[[torch.device], str],
    arguments: tuple[Any, ...],
) -> tuple[str, str]:
    """Describes kernels of states. In fixed order prompts are walked through by token, too."""
    from tandem_kernels.linear_attention.delta_tuning import FIXED

    device, (metadata, *rest) = arguments[0].device, arguments[OF_STATES[name] :]
    decodes, requests = metadata.num_decodes, len(metadata.seq_lens)
    fields, kernels, tiles = ("values", "num_warps"), list[str](), list[str]()
    if rest and rest[0]:
        return by_token, fields_of(FIXED, *fields)
    if decodes > 0:
        kernels.append(by_token)
        tiles.append(fields_of(of_decodes(device, decodes), *fields))
    if decodes < requests:
        kernels.append("chunk kernels")
        tiles.append(of_prompts(device))
    return "; ".join(kernels), "; ".join(tiles)


def _fused(kernel: str, *, gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, *rest: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.fused_tuning import fused_tuning

        tuning = fused_tuning(x.device, gated)
        return kernel, fields_of(tuning, "rows", "cols", "depth", "num_warps", "num_stages")

    return of


def _few_rows(
    kernel: str, by_warps: str = "", *, by_inner: bool = True
) -> Callable[..., tuple[str, str]]:
    """Describes a product in registers, or by warps where the launcher has `by_warps`. Not
    `by_inner`: tiles are the same whatever the inner dimension is."""

    def of(x: Tensor, weight: Tensor, *rest: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.few_row_gemm import few_row_tuning
        from tandem_kernels.gemm.few_row_warp_shapes import few_row_warp_tuning, takes_warps

        if by_warps and takes_warps(x, weight):
            warps = few_row_warp_tuning(x.device, *weight.shape)
            return by_warps, fields_of(warps, "warps", "ahead")
        size = weight.shape if by_inner else weight.shape[:1]
        tuning = few_row_tuning(x.device, len(x), *size)
        return kernel, fields_of(tuning, "cols", "depth", "num_warps", "num_stages")

    return of


def _small_m(gated: bool, kernel: str = "small_m_gemm_kernel") -> Callable[..., tuple[str, str]]:
    def of(*arguments: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.small_m_gemm import small_m_tuning

        x, weight = arguments[:2]
        outputs = outputs_of(weight, gated=gated)
        tuning = small_m_tuning(x.device, gated, len(x), outputs, weight.shape[1])
        fields = "cols", "depth", "splits", "num_warps", "num_stages"
        return kernel, fields_of(tuning, *fields)

    return of


def _fp8(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, scales: Tensor, weight: Tensor, w_scales: Tensor, *rest: Any) -> Any:
        from tandem_kernels.gemm.fp8_few_rows import few_fp8_tuning
        from tandem_kernels.gemm.fp8_paths import fp8_path, is_own
        from tandem_kernels.gemm.fp8_tuning import fp8_tuning

        path = fp8_path(len(x), weight, w_scales)
        if not is_own(len(x), weight, w_scales):
            return "library FP8 GEMM", f"path {path}"
        size, blocks = (len(weight), weight.shape[1]), w_scales.dim() == 2
        if path == "few":
            few = few_fp8_tuning(x.device, len(x), *size)
            return "fp8_few_row_kernel", fields_of(few, "cols", "depth", "num_warps")
        size = (outputs_of(weight, gated=gated), size[1])
        tuning = fp8_tuning(x.device, len(x), *size, gated=gated, blocks=blocks)
        return "fp8_small_m_kernel", fields_of(tuning, *_OF_WEIGHTS)

    return of


_OF_WEIGHTS = "cols", "depth", "splits", "num_warps", "num_stages"
"""Fields of kernels whose programs may share the inner dimension."""


def _int4(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, packed: Tensor, *rest: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.int4_tuning import FIXED, int4_tuning

        size = outputs_of(packed, gated=gated), x.shape[1]
        is_fixed = any(one is True for one in rest)
        tuning = FIXED if is_fixed else int4_tuning(x.device, len(x), *size, gated=gated)
        return "int4_gemm_kernel", fields_of(tuning, "rows", "cols", *_OF_WEIGHTS[2:])

    return of


def _fp4(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, tiles: Tensor, *rest: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.fp4_tiles import SIDE
        from tandem_kernels.gemm.fp4_tuning import FIXED, fp4_tuning

        size = outputs_of(tiles, gated=gated) * SIDE, x.shape[1]
        is_fixed = any(one is True for one in rest)
        tuning = FIXED if is_fixed else fp4_tuning(x.device, len(x), *size, gated=gated)
        return "fp4_gemm_kernel", fields_of(tuning, "rows", *_OF_WEIGHTS)

    return of


def _int8(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, scales: Tensor, weight: Tensor, *rest: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.fp8_tuning import fp8_tuning
        from tandem_kernels.gemm.int8_gemm import int8_tuning, is_small

        if is_small(len(x), weight):
            size = outputs_of(weight, gated=gated), weight.shape[1]
            few = fp8_tuning(x.device, len(x), *size, gated=gated, blocks=False)
            return "fp8_small_m_kernel", fields_of(few, *_OF_WEIGHTS)
        tuning = int8_tuning(x.device, len(x), len(weight))
        sizes = "rows", "cols", "depth", "num_warps", "num_stages"
        return "int8_gemm_kernel", fields_of(tuning, *sizes)

    return of


_KNOWN: dict[str, Callable[..., tuple[str, str]]] = {
    "paged_attention": _paged,
    "latent_attention": _latent,
    "sparse_latent_attention": _sparse_latents,
    "window_rows_attention": _window_rows,
    "window_rows_fp8": _window_rows,
    "block_sparse_attention": _of_blocks,
    "choose_blocks": lambda *_: ("block_scores_kernel, choose_blocks_kernel", ""),
    "index_topk": _index,
    "fused_gate_up": _fused("fused_gate_up_kernel", gated=True),
    "fused_qkv": _fused("fused_qkv_kernel", gated=False),
    "gated_delta_rule": _delta,
    "mamba_scan": _mamba,
    "few_row_gemm": _few_rows("few_row_gemm_kernel", "few_row_warp_kernel"),
    "few_row_conv": _few_rows("few_row_conv_kernel"),
    "few_row_qkv": _few_rows("few_row_qkv_kernel", "few_row_warp_qkv_kernel", by_inner=False),
    "small_m_gemm": _small_m(gated=False),
    "small_m_gate_up": _small_m(gated=True),
    "small_m_qkv": _small_m(gated=False, kernel="small_m_qkv_kernel"),
    "fp8_gemm": _fp8(gated=False),
    "fp8_gate_up": _fp8(gated=True),
    "fp8_group_gemm": _fp8(gated=False),
    "int4_gemm": _int4(gated=False),
    "int4_gate_up": _int4(gated=True),
    "fp4_gemm": _fp4(gated=False),
    "fp4_gate_up": _fp4(gated=True),
    "int8_gemm": _int8(gated=False),
    "int8_gate_up": _int8(gated=True),
    "fused_experts": expert_tiles.plain_experts,
    "experts_beside": expert_tiles.experts_beside,
    "fp8_experts": expert_tiles.fp8_experts,
    "fp4_experts": expert_tiles.fp4_experts,
    "fp4_routed_experts": expert_tiles.fp4_routed,
}
