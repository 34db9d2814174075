"""FlashAttention 3, where a package with its kernels is installed.

    flash_attn_interface   whole: attends over the paged cache, and uncached prompts
    fa3_fwd_interface      its forward kernels alone, a ready wheel (extra `fa3`): uncached prompts

It reads lengths on the device and takes any strides, so our cache, our projection and metadata
serve it as they are. FlashInfer is not here: it plans each step on the host from lengths that only
the device knows. Source: Shah et al., FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from engine.layers.attention.backend import AttentionSpec
from engine.layers.attention.whole_prompts.uncached_prefill import (
    DensePrefill,
    UncachedPrefillMetadata,
)
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import PagedKV, apart, sizes_of
from tandem_kernels.attention.ragged_batch import RaggedBatch
from tandem_kernels.device import has_warpgroup_mma

PACKAGE = "flash_attn_interface"
PREFILL_PACKAGE = "fa3_fwd_interface"
_OPERATORS = {PACKAGE: "flash_attn_3", PREFILL_PACKAGE: "fa3_fwd"}
"""The namespace in `torch.ops` in which each package registers its kernels."""
_UNLIKE_SIZES = {(192, 128)}
"""Widths of keys and values that its kernels take although they differ."""


ForwardKernel = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
_stand_ins: list[ForwardKernel | None] = []
"""Kernels that count in place of those that are installed; the last of them does."""


@contextmanager
def standing_in(forward: ForwardKernel | None) -> Iterator[None]:
    """Inside the context the ready wheel counts as installed, and `forward` is its kernel. None:
    no package counts as installed."""
    _stand_ins.append(forward)
    try:
        yield
    finally:
        _stand_ins.pop()


def is_installed(package: str = PACKAGE) -> bool:
    if _stand_ins:
        return package == PREFILL_PACKAGE and _stand_ins[-1] is not None
    return importlib.util.find_spec(package) is not None


def attends_prompts() -> bool:
    """Returns whether a package is installed that attends to uncached prompts: either does."""
    return is_installed(PACKAGE) or is_installed(PREFILL_PACKAGE)


def is_available(
    dtype: torch.dtype, head_dim: int, device: torch.device, v_head_dim: int | None = None
) -> bool:
    """Returns whether its kernels are made for this; values are as wide as keys unless
    `v_head_dim` says otherwise."""
    return (
        (v_head_dim in (None, head_dim) or (head_dim, v_head_dim) in _UNLIKE_SIZES)
        and has_warpgroup_mma(device)
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim <= 256
        and head_dim % 8 == 0
    )


def flash_attention(
    q: Tensor,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Does what `tandem_kernels.reference.attention.paged_attention` does: `q` [T, Hq, D] ->
    [T, Hq, Dv]. Rows of requests with `seq_lens` 0 are anything."""
    pages = apart(kv_cache)
    keys, values = pages.k.transpose(1, 2), pages.v.transpose(1, 2)
    more = {} if sinks is None else {"return_softmax_lse": True}
    attended = importlib.import_module(PACKAGE).flash_attn_with_kvcache(
        q,
        keys,
        values,
        cache_seqlens=metadata.seq_lens,
        page_table=metadata.block_tables,
        cu_seqlens_q=metadata.query_start_loc,
        max_seqlen_q=metadata.max_query_len,
        softmax_scale=scale,
        causal=True,
        **more,
    )
    if sinks is None:
        return cast(Tensor, attended)
    out, log_sums, *_ = attended
    ops.add_sinks(out, log_sums, sinks)
    return cast(Tensor, out)


def forward_kernel(package: str) -> ForwardKernel:
    """Returns the operator below the package's Python interface, which is made for training and
    takes the host some 200 us a call, where the operator takes 75.

    Raises:
        ImportError or OSError: The package does not load, or registers no such operator.
    """
    if _stand_ins and (stand_in := _stand_ins[-1]) is not None:
        return stand_in
    importlib.import_module(package)
    try:
        operator = getattr(torch.ops, _OPERATORS[package]).fwd.default
    except AttributeError as error:
        raise ImportError(f"{package} registers no forward kernel: {error}") from None
    return cast(ForwardKernel, operator)


class FlashRagged:
    """Does what `tandem_kernels.reference.ragged.ragged_attention` does: q [T, H, D], k [C, H, D]
    and v [C, H, V] -> (attended [T, H, V], logarithms of the sums [H, T] float32)."""

    def __init__(self, package: str) -> None:
        """Raises `ImportError` or `OSError` when the package does not load."""
        self._forward = forward_kernel(package)

    @staticmethod
    def package(dtype: torch.dtype, key: int, value: int, device: torch.device) -> str | None:
        """Returns the one to use for these widths of heads, or None when there is none."""
        return FlashPrefill.package(dtype, key, device, value)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, scale: float
    ) -> tuple[Tensor, Tensor]:
        attended, log_sums, *_ = self._forward(
            q,
            k,
            v,
            cu_seqlens_q=batch.query_bounds,
            cu_seqlens_k=batch.key_bounds,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_key_len,
            softmax_scale=scale,
            is_causal=batch.causal,
            num_splits=1,
        )
        return attended, log_sums


class FlashPrefill(DensePrefill):
    """Attends to all long uncached prompts of a step in one launch. Shorter ones are left to the
    others: they share one launch with what else is in the step."""

    name = "FlashAttention 3"
    has_sinks = True

    def __init__(self, package: str, min_tokens: int) -> None:
        """Raises `ImportError` or `OSError` when the package does not load."""
        self.min_tokens = min_tokens
        self._forward = forward_kernel(package)
        self.ragged = FlashRagged(package)

    @staticmethod
    def package(
        dtype: torch.dtype, head_dim: int, device: torch.device, v_head_dim: int | None = None
    ) -> str | None:
        """Returns the one to use here, or None when there is none."""
        if not is_available(dtype, head_dim, device, v_head_dim):
            return None
        if is_installed(PACKAGE):
            return PACKAGE
        can = dtype == torch.bfloat16 and is_installed(PREFILL_PACKAGE)
        return PREFILL_PACKAGE if can else None

    def attend(
        self, spec: AttentionSpec, heads: Tensor, metadata: UncachedPrefillMetadata
    ) -> Tensor:
        lengths = metadata.prompt_lens
        q, k, v = spec.split(heads)
        first = metadata.num_decodes
        bounds = metadata.query_start_loc[first : first + len(lengths) + 1]
        return self._attend(q, k, v, bounds, max(lengths), spec.scale, spec.sinks)

    def prepare(
        self, num_heads: int, kv_cache: PagedKV, dtype: torch.dtype, max_tokens: int
    ) -> None:
        """Loads its kernels onto the device: any length has the same. Arguments as in
        `AttentionBackend.prepare`."""
        num_kv_heads, _, head_dim, v_head_dim = sizes_of(kv_cache)
        heads = (num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, v_head_dim)
        q, k, v = (
            torch.zeros((self.min_tokens, *size), dtype=dtype, device=kv_cache.device)
            for size in heads
        )
        bounds = torch.tensor([0, self.min_tokens], dtype=torch.int32, device=q.device)
        self._attend(q, k, v, bounds, self.min_tokens, head_dim**-0.5)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        longest: int,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attended, log_sums, *_ = self._forward(
            q,
            k,
            v,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            is_causal=True,
            num_splits=1,
        )
        if sinks is not None:
            ops.add_sinks(attended, log_sums, sinks)
        return attended
