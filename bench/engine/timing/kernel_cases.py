"""Serving-shaped inputs of each operation, with the bytes and FLOPs that it cannot avoid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.engine.timing.device_time import rotations
from engine.head_sizes import HeadSizes
from engine.layers.attention.backend import AttentionSpec
from engine.layers.attention.whole_prompts.flash_attention import FlashPrefill
from engine.layers.attention.whole_prompts.uncached_prefill import split_metadata
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.attention_thresholds import whole_prompts
from tandem_kernels.attention.kv_pages import KVPages, PagedKV
from tandem_kernels.attention.kv_scales import E4M3, KVScales
from tandem_kernels.batch.batch_tables import GroupTables, RowTables, StepInputs

BF16 = torch.bfloat16
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 32, 8, 128, 4096, 14336, 128256
SCALE = HEAD_DIM**-0.5


@dataclass
class Case:
    """`calls` run over different buffers; `bytes` and `flops` count one call."""

    op: str
    shape: str
    calls: list[Callable[[], object]]
    bytes: float
    flops: float = 0.0
    others: dict[str, list[Callable[[], object]]] = field(default_factory=dict)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


@dataclass
class PagedInputs:
    q: Tensor
    kv_caches: list[Tensor]
    metadata: AttentionMetadata
    kv_bytes: float
    kv_scales: KVScales | None = None

    def calls(self) -> list[Callable[[], object]]:
        attend = partial(ops.paged_attention, kv_scales=self.kv_scales)
        return [partial(attend, self.q, cache, self.metadata, SCALE) for cache in self.kv_caches]


def scattered(
    seq_lens: list[int], query_lens: list[int], block_size: int, window: int | None = None
) -> tuple[AttentionMetadata, int]:
    """Returns requests whose blocks lie anywhere, and the number of blocks."""
    blocks = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(blocks), device="cuda").int()
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device="cuda")
    for table, own in zip(tables, order.split(blocks), strict=True):
        table[: len(own)] = own
    metadata = AttentionMetadata(
        block_tables=tables,
        query_start_loc=torch.tensor([0, *query_lens], device="cuda").cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        num_decodes=next((r for r, n in enumerate(query_lens) if n > 1), len(query_lens)),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        window=window,
    )
    return metadata, sum(blocks)


def paged_inputs(
    seq_lens: list[int],
    query_lens: list[int],
    block_size: int = 128,
    most_caches: int = 32,
    kv_dtype: torch.dtype = BF16,
) -> PagedInputs:
    """Makes several caches, as the layers of a model have."""
    metadata, num_blocks = scattered(seq_lens, query_lens, block_size)
    kv_bytes = 2 * sum(seq_lens) * NUM_KV_HEADS * HEAD_DIM * kv_dtype.itemsize
    caches = [
        randn(num_blocks, 2, NUM_KV_HEADS, block_size, HEAD_DIM).to(kv_dtype)
        for _ in range(rotations(kv_bytes, most_caches))
    ]
    q = randn(sum(query_lens), NUM_Q_HEADS, HEAD_DIM)
    ones = torch.ones(NUM_KV_HEADS, device="cuda")
    scales = KVScales(ones, ones) if kv_dtype == E4M3 else None
    return PagedInputs(q, caches, metadata, kv_bytes, scales)


def decode_attention_cases() -> Iterator[Case]:
    """Lists cases with blocks of 128 tokens unless the shape says otherwise."""
    yield from _decodes("decode attention", BF16)
    for block_size in (16, 64):
        given = paged_inputs([1024] * 64, [1] * 64, block_size)
        label = f"64 x 1024, blocks of {block_size}"
        yield Case("decode attention", label, given.calls(), given.kv_bytes)
    given = paged_inputs([200 + 120 * i for i in range(64)], [1] * 64)
    yield Case("decode attention", "64 x 200..7760", given.calls(), given.kv_bytes)


def fp8_attention_cases() -> Iterator[Case]:
    """Lists cases over an FP8 cache, with blocks of 128 tokens."""
    yield from _decodes("fp8 decode attention", E4M3)
    for label, seq_len, query_len in (
        ("8192", 8192, 8192),
        ("2048 behind 8192", 10240, 2048),
        ("256 behind 8192", 8448, 256),
    ):
        given = paged_inputs([seq_len], [query_len], kv_dtype=E4M3)
        flops = attention_flops([seq_len], [query_len])
        moved = given.kv_bytes + 2 * given.q.nbytes
        yield Case("fp8 prefill attention", label, given.calls(), moved, flops)


def _decodes(op: str, kv_dtype: torch.dtype) -> Iterator[Case]:
    for batch, context in itertools.product((1, 16, 64, 128, 256), (1024, 8192)):
        given = paged_inputs([context] * batch, [1] * batch, kv_dtype=kv_dtype)
        yield Case(op, f"{batch} x {context}", given.calls(), given.kv_bytes)


def attention_flops(seq_lens: list[int], query_lens: list[int]) -> float:
    pairs = sum(q * (n - q) + q * (q + 1) / 2 for n, q in zip(seq_lens, query_lens, strict=True))
    return 4.0 * NUM_Q_HEADS * HEAD_DIM * pairs


def dense_attention(
    num_prompts: int, length: int, bounds: Tensor
) -> dict[str, list[Callable[[], object]]]:
    """Computes, by libraries, prompts without a prefix on dense queries, keys and values."""
    sizes = [NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    heads = randn(num_prompts * length, sum(sizes), HEAD_DIM)
    q, k, v = (
        part.unflatten(0, (num_prompts, length)).transpose(1, 2)
        for part in torch.split(heads, sizes, dim=1)
    )

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    others: dict[str, list[Callable[[], object]]] = {
        "sdpa flash": [lambda: run(SDPBackend.FLASH_ATTENTION)],
        "sdpa cudnn": [lambda: run(SDPBackend.CUDNN_ATTENTION)],
    }
    package = FlashPrefill.package(BF16, HEAD_DIM, heads.device)
    if package is not None:
        lengths = torch.empty(num_prompts, device=heads.device)
        spec = AttentionSpec(NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, SCALE)
        whole = AttentionMetadata(lengths, bounds, lengths, 0, length, length)
        uncached = split_metadata(whole, (length,) * num_prompts)
        flash = FlashPrefill(package, whole_prompts(heads.device).flash_tokens)
        others["FlashAttention 3"] = [lambda: flash.attend(spec, heads.flatten(1), uncached)]
    return others


def prefill_attention_cases() -> Iterator[Case]:
    """Lists cases with blocks of 128 tokens unless the shape says otherwise."""
    for label, seq_lens, query_lens, block_size in [
        ("512", [512], [512], 128),
        ("2048", [2048], [2048], 128),
        ("8192", [8192], [8192], 128),
        ("8192, blocks of 64", [8192], [8192], 64),
        ("8192, blocks of 16", [8192], [8192], 16),
        ("32768", [32768], [32768], 128),
        ("8 x 1024", [1024] * 8, [1024] * 8, 128),
        ("4 x 2048", [2048] * 4, [2048] * 4, 128),
        ("2048 behind 8192", [10240], [2048], 128),
        ("256 behind 8192", [8448], [256], 128),
        ("64 decodes + 2048", [1024] * 64 + [2048], [1] * 64 + [2048], 128),
    ]:
        given = paged_inputs(seq_lens, query_lens, block_size)
        flops = attention_flops(seq_lens, query_lens)
        others = {}
        if block_size == 128 and seq_lens == query_lens:
            bounds = given.metadata.query_start_loc
            others = dense_attention(len(seq_lens), seq_lens[0], bounds)
        moved = given.kv_bytes + 2 * given.q.nbytes
        yield Case("prefill attention", label, given.calls(), moved, flops, others)


@dataclass(frozen=True)
class _Kind:
    """Layers of one kind.

    Attributes:
        block_size: Of the tokens that fit one page beside the model's other layers.
    """

    heads: HeadSizes
    window: int | None
    block_size: int
    has_sinks: bool = False


def _heads(queries: int, kv: int, key: int, value: int) -> HeadSizes:
    return HeadSizes(num_heads=queries, num_kv_heads=kv, head_dim=key, v_head_dim=value)


KINDS = {
    "mimo-v2-flash full": _Kind(_heads(64, 4, 192, 128), None, 128),
    "mimo-v2-flash window": _Kind(_heads(64, 8, 192, 128), 129, 64, has_sinks=True),
    "gemma-4-26b full": _Kind(_heads(16, 2, 512, 512), None, 128),
    "gemma-4-26b window": _Kind(_heads(16, 8, 256, 256), 1024, 64),
}


def layered_attention_cases() -> Iterator[Case]:
    """Lists decodes of 1, 16 and 64 rows, and prompts of 2048 and 8192 tokens, of each kind."""
    for (name, kind), rows, context in itertools.product(
        KINDS.items(), (1, 16, 64), (1024, 16_384)
    ):
        calls, _, kv_bytes = _given(kind, [context] * rows, [1] * rows)
        yield Case("layered decode attention", f"{name}, {rows} x {context}", calls, kv_bytes)
    for (name, kind), length in itertools.product(KINDS.items(), (2048, 8192)):
        calls, q_bytes, kv_bytes = _given(kind, [length], [length])
        heads, seen = kind.heads, min(kind.window or length, length)
        pairs = seen * (seen + 1) / 2 + (length - seen) * seen
        flops = 2.0 * heads.num_heads * (heads.head_dim + heads.v_head_dim) * pairs
        moved = kv_bytes + 2 * q_bytes
        yield Case("layered prefill attention", f"{name}, {length}", calls, moved, flops)


def _given(
    kind: _Kind, seq_lens: list[int], query_lens: list[int]
) -> tuple[list[Callable[[], object]], float, float]:
    """Returns calls over several caches, the bytes of queries, and those of keys and values that
    are seen."""
    heads, size = kind.heads, kind.block_size
    metadata, num_blocks = scattered(seq_lens, query_lens, size, kind.window)
    seen = [
        length if kind.window is None else min(length, kind.window + new - 1)
        for length, new in zip(seq_lens, query_lens, strict=True)
    ]
    kv_bytes = 2.0 * sum(seen) * heads.num_kv_heads * (heads.head_dim + heads.v_head_dim)
    q = randn(sum(query_lens), heads.num_heads, heads.head_dim)
    sinks = torch.randn(heads.num_heads, device="cuda") if kind.has_sinks else None
    scale = heads.head_dim**-0.5
    calls: list[Callable[[], object]] = [
        partial(ops.paged_attention, q, cache, metadata, scale, 0.0, sinks)
        for cache in _caches(heads, size, num_blocks, rotations(kv_bytes, 16))
    ]
    return calls, float(q.nbytes), kv_bytes


def _caches(heads: HeadSizes, size: int, num_blocks: int, count: int) -> list[PagedKV]:
    """Returns caches as `kv_pages` describes them."""
    keys, values = (heads.num_kv_heads * size * dim for dim in (heads.head_dim, heads.v_head_dim))
    found: list[PagedKV] = []
    for _ in range(count):
        pages = torch.empty(num_blocks, keys + values, device="cuda", dtype=BF16).normal_()
        if keys == values:
            found.append(pages.view(num_blocks, 2, heads.num_kv_heads, size, heads.head_dim))
            continue
        shape = num_blocks, heads.num_kv_heads, size, -1
        found.append(KVPages(pages[:, :keys].view(shape), pages[:, keys:].view(shape)))
    return found


def elementwise_cases() -> Iterator[Case]:
    weight = randn(HIDDEN)
    for tokens in (1, 16, 64, 256, 2048, 8192):
        row = tokens * HIDDEN * 2
        xs = [randn(tokens, HIDDEN) for _ in range(rotations(2 * row))]
        residuals = [torch.randn_like(x) for x in xs]
        yield Case(
            "add + rms norm",
            f"{tokens}",
            [
                partial(ops.fused_add_rms_norm, x, r, weight, 1e-5)
                for x, r in zip(xs, residuals, strict=True)
            ],
            4 * row,
        )
        gates = [
            randn(tokens, 2 * INTERMEDIATE) for _ in range(rotations(tokens * INTERMEDIATE * 4))
        ]
        yield Case(
            "silu * mul",
            f"{tokens}",
            [partial(ops.silu_and_mul, x) for x in gates],
            3 * tokens * INTERMEDIATE * 2,
        )
        yield rope_case(tokens)
        yield rope_case(tokens, E4M3)


def rope_case(tokens: int, kv_dtype: torch.dtype = BF16) -> Case:
    block_size = 64
    heads = NUM_Q_HEADS + 2 * NUM_KV_HEADS
    sets = rotations(tokens * heads * HEAD_DIM * 2)
    projections = [randn(tokens, heads, HEAD_DIM) for _ in range(sets)]
    blocks = -(-tokens // block_size)
    caches = [
        randn(blocks, 2, NUM_KV_HEADS, block_size, HEAD_DIM).to(kv_dtype) for _ in range(sets)
    ]
    ones = torch.ones(NUM_KV_HEADS, device="cuda")
    write = ops.rope_and_cache
    if kv_dtype == E4M3:
        write = partial(ops.rope_and_cache, kv_scales=KVScales(ones, ones))
    positions = torch.arange(tokens, device="cuda")
    table = randn(8192, HEAD_DIM, dtype=torch.float32)
    calls = []
    for projection, cache in zip(projections, caches, strict=True):
        q, k, v = projection.split([NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        calls.append(partial(write, q, k, v, positions, table, cache, positions))
    saved = 2 * NUM_KV_HEADS * (2 - kv_dtype.itemsize)
    moved = tokens * HEAD_DIM * (2 * heads * 2 + 4 - saved)
    label = f"{tokens}, fp8" if kv_dtype == E4M3 else f"{tokens}"
    return Case("rope + kv write", label, calls, moved)


def sampling_cases() -> Iterator[Case]:
    """Lists cases with peaked logits, which have a few likely tokens, as a language model's, and
    with flat ones, the worst.
    """
    for rows in (1, 16, 64, 256):
        sets = rotations(rows * VOCAB * 4, 8)
        flat = [randn(rows, VOCAB, dtype=torch.float32) * 2 for _ in range(sets)]
        peaked = [x.clone() for x in flat]
        for x in peaked:
            x[:, torch.randperm(VOCAB)[:64]] += torch.linspace(18, 6, 64, device="cuda")
        ones, zeros = torch.ones(rows, device="cuda"), torch.zeros(rows, device="cuda")
        no_k = torch.zeros(rows, dtype=torch.int32, device="cuda")
        keys = torch.arange(rows, device="cuda")
        for label, parameters, filters in [
            ("greedy", (zeros, no_k, ones, zeros), False),
            ("temperature", (ones, no_k, ones, zeros), False),
            ("top-p 0.9", (ones, no_k, ones * 0.9, zeros), True),
            ("top-k 20, top-p 0.95", (ones, no_k + 20, ones * 0.95, zeros), True),
        ]:
            for shape, logits in {"flat": flat, "peaked": peaked}.items():
                calls = [partial(ops.sample, x, *parameters, keys, keys, filters) for x in logits]
                yield Case("sample", f"{rows} {shape}, {label}", calls, rows * VOCAB * 4)
        calls = [partial(ops.topk_logprobs, x, keys, 5) for x in flat]
        yield Case("top-5 logprobs", f"{rows}", calls, rows * VOCAB * 4)


def batch_cases() -> Iterator[Case]:
    """Lists the bookkeeping of a decode step of 256 requests, and the copy of KV blocks."""
    rows, max_len, block_size = 1024, 8192, 64
    ints = {"dtype": torch.int32, "device": "cuda"}
    tables = RowTables(
        token_ids=torch.randint(0, VOCAB, (rows, max_len), **ints),
        num_computed=torch.full((rows,), 1000, **ints),
        total_len=torch.full((rows,), 1001, **ints),
        max_len=torch.full((rows,), max_len, **ints),
        block_table=torch.randint(0, 1000, (rows, max_len // block_size), **ints),
        block_size=block_size,
    )
    out = StepInputs(
        torch.zeros(8192, **ints),
        torch.zeros(8192, dtype=torch.int64, device="cuda"),
        torch.zeros(8192, dtype=torch.int64, device="cuda"),
        torch.zeros(rows, **ints),
        torch.zeros(rows, max_len // block_size, **ints),
    )
    mapping = torch.randperm(rows, device="cuda")[:256].int()
    bounds = torch.arange(257, **ints)
    sampled = torch.full((256, 1), -1, device="cuda")
    prepare = [partial(ops.prepare_inputs, mapping, bounds, GroupTables.of((tables,), (out,)))]
    yield Case("prepare inputs", "256 decodes", prepare, 256 * 100)
    update = [partial(ops.post_update, mapping, bounds, sampled, tables)]
    yield Case("post update", "256 decodes", update, 256 * 40)
