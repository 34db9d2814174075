"""Attention of one query token per request over a window of few positions.

A program has one request and one KV head, and takes the whole window at once: there is nothing to
walk, so what it waits for is memory that answers, a few times one behind the other. All but the
newest position were written in earlier steps. Their keys and values are on their way to registers
before the kernel in front has ended (PDL); behind it only the query and the newest position are
loaded:

    before the wait    length ─▶ blocks ─▶ keys, values of [length - window, length - 1)
    behind it          query, key and value of length - 1; scores, softmax, output
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.attention_sink import sink_of, with_sink
from tandem_kernels.attention.decode_ahead import attend_ahead
from tandem_kernels.attention.head_planes import planes_of_head
from tandem_kernels.attention.kv_pages import PagedKV, first_of, sizes_of
from tandem_kernels.device import supports_pdl
from tandem_kernels.product_precision import precision_of

LOG2_E = 1.4426950408889634
_MOST_BYTES = 32 * 1024
"""Bounds the keys of a window, which registers hold beside its values."""
_BYTES_OF_WARP = 4 * 1024


def takes_window(q: Tensor, kv_cache: PagedKV, window: int | None) -> bool:
    """Returns whether a window's keys and values fit. A cache of other numbers than the query's
    does not."""
    if window is None or kv_cache.dtype != q.dtype:
        return False
    return _bytes_of_keys(q, window) <= _MOST_BYTES


def _bytes_of_keys(q: Tensor, window: int) -> int:
    row_bytes: int = triton.next_power_of_2(q.shape[-1]) * q.dtype.itemsize
    span: int = triton.next_power_of_2(window)
    return span * row_bytes


@triton.jit
def window_attention_kernel(
    q: tl.tensor,
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Attends, in program (r, h), for the query heads of KV head h of request r. SPAN: WINDOW or
    the power of two behind it."""
    r = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    row = tl.arange(0, ROWS)
    seq_len = tl.load(seq_lens + r)
    newest = seq_len - 1
    position = tl.maximum(seq_len - WINDOW, 0) + tl.arange(0, SPAN)
    older = position < newest
    table = block_tables + r * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=older, other=0).to(tl.int64)
    keys_at, values_at = planes_of_head(
        kv_cache, head, head_stride, value_stride, HEAD_DIM, VALUE_DIM
    )
    place = block * block_stride + position % BLOCK_SIZE * HEAD_DIM
    inside = older[:, None] & (dim < HEAD_DIM)[None, :]
    keys = tl.load(keys_at + place[:, None] + dim[None, :], mask=inside, other=0.0)
    place = block * block_stride + position % BLOCK_SIZE * VALUE_DIM
    inside = older[:, None] & (value_dim < VALUE_DIM)[None, :]
    values = tl.load(values_at + place[:, None] + value_dim[None, :], mask=inside, other=0.0)
    own_block = tl.load(table + newest // BLOCK_SIZE, mask=newest >= 0, other=0).to(tl.int64)
    query_head = head * GROUP + row
    if HAS_SINKS:
        sink = sink_of(sinks, query_head, row < GROUP)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    own = keys_at + own_block * block_stride + newest % BLOCK_SIZE * HEAD_DIM + dim
    own_value = values_at + own_block * block_stride + newest % BLOCK_SIZE * VALUE_DIM + value_dim
    real = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    at = r * q_stride + query_head[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(q + at, mask=real, other=0.0)
    # A request without a context has one position, of zeros.
    peak, total, acc = attend_ahead(
        query, keys, values, older, own, own_value, newest >= 0, scale, cap,
        HEAD_DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, CAPPED, PRECISION, 0.0,
    )  # fmt: skip
    if HAS_SINKS:
        total = with_sink(total, peak, sink)
    to = (r * NUM_KV_HEADS * GROUP + query_head[:, None]) * VALUE_DIM + value_dim[None, :]
    kept = (row < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=kept)


def window_attention(
    q: Tensor,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Attends for one query token of each request; only where `takes_window` says so. Arguments
    are those of `decode_attention`."""
    num_reqs, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size, _, value_dim = sizes_of(kv_cache)
    group, window = num_q_heads // num_kv_heads, metadata.window
    assert window is not None
    overlap = supports_pdl(q.device)
    window_attention_kernel[(num_reqs, num_kv_heads)](
        q,
        first_of(kv_cache),
        metadata.block_tables,
        metadata.seq_lens,
        sinks,
        out,
        *metadata.strides(q, kv_cache),
        scale * LOG2_E,
        softcap / scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        VALUE_DIM=value_dim,
        BLOCK_VALUE=triton.next_power_of_2(value_dim),
        BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
        WINDOW=window,
        SPAN=max(16, triton.next_power_of_2(window)),
        CAPPED=softcap > 0,
        HAS_SINKS=sinks is not None,
        PRECISION=precision_of(q),
        OVERLAP=overlap,
        num_warps=max(4, _bytes_of_keys(q, window) // _BYTES_OF_WARP),
        **({"launch_pdl": True} if overlap else {}),
    )
