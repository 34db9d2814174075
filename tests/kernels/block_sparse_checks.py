"""Checks the choice of blocks, and attention to chosen ones, against float64 and loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fp8_checks
import kernel_oracle as oracle
import torch
from kernel_checks import ATTENTION

from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.kv_scales import KVScales

Op = Callable[..., Any]
Lengths = tuple[list[int], list[int]]
"""Has lengths of contexts and of queries."""


def _batch(
    lengths: Lengths, sizes: tuple[int, int, int], block_size: int, drafts: int, **rest: Any
) -> oracle.PagedBatch:
    """Returns requests of (Hkv, group, D) heads. `drafts`: query tokens of decodes, if all are."""
    num_kv_heads, group, dim = sizes
    batch = oracle.paged_batch(
        *lengths,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=dim,
        block_size=block_size,
        **rest,
    )
    if not drafts:
        return batch
    uniform = {"num_decodes": len(lengths[0]), "decode_query_len": drafts}
    return replace(batch, metadata=replace(batch.metadata, **uniform))


def choose_blocks(
    op: Op,
    lengths: Lengths,
    sizes: tuple[int, int],
    choice: BlockChoice,
    *,
    block_size: int = 16,
    drafts: int = 0,
    fixed_order: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Checks what every query chooses. `sizes` is (G, D). Numbers are whole and small, so that
    scores are exact and many are equal: of those the very first must be chosen."""
    groups, dim = sizes
    batch = _batch(lengths, (1, groups, dim), block_size, drafts, dtype=dtype, device=device)
    metadata = replace(batch.metadata, fixed_order=fixed_order)
    q = torch.randint(-2, 3, batch.q.shape, device=device).to(dtype)
    keys = torch.randint(-1, 2, batch.kv_cache[:, 0, 0].shape, device=device).to(dtype)
    pages = IndexPages(keys)
    chosen = op(q, pages, metadata, choice)
    assert chosen.shape == (len(q), groups, choice.top_k) and chosen.dtype == torch.int32
    row = 0
    for r, (seq_len, query_len) in enumerate(zip(*lengths, strict=True)):
        table = metadata.block_tables[r].tolist()
        own = [keys[table[p // block_size], p % block_size] for p in range(seq_len)]
        for token in range(query_len):
            seen = max(0, seq_len - query_len + token + 1)
            for group in range(groups):
                scores = [float(q[row, group].double() @ key.double()) for key in own[:seen]]
                expected = _best(scores, choice)
                found = chosen[row, group].tolist()
                assert found == expected + [-1] * (choice.top_k - len(expected))
            row += 1


def _best(scores: list[float], choice: BlockChoice) -> list[int]:
    """Returns the blocks that one query chooses by the scores of what it sees."""
    blocks = [scores[i : i + choice.size] for i in range(0, len(scores), choice.size)]
    newest = len(blocks) - 1
    order = sorted(
        range(len(blocks)),
        key=lambda b: (-float("inf") if b > newest - choice.local else -max(blocks[b]), b),
    )
    return sorted(order[: choice.top_k])


def block_sparse_attention(
    op: Op,
    lengths: Lengths,
    sizes: tuple[int, int, int],
    choice: BlockChoice,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    drafts: int = 0,
    fixed_order: bool = False,
    fp8: bool = False,
    value_dim: int | None = None,
    device: str = "cpu",
) -> None:
    """Checks attention to random blocks of each context, the newest among them. `sizes` is (Hkv,
    group, D)."""
    num_kv_heads, group, _ = sizes
    rest = {"dtype": dtype, "device": device, "value_dim": value_dim, "page_padding": 8}
    batch = _batch(lengths, sizes, block_size, drafts, **rest)
    scales: KVScales | None = None
    if fp8:
        batch, scales = fp8_checks.in_fp8(batch)
    metadata = replace(batch.metadata, fixed_order=fixed_order)
    chosen = torch.full(
        (len(batch.q), num_kv_heads, choice.top_k), -1, dtype=torch.int32, device=device
    )
    width = value_dim or sizes[2]
    expected = torch.zeros(*batch.q.shape[:2], width, dtype=torch.float64, device=device)
    row = 0
    for k, v, seq_len, query_len in zip(batch.keys, batch.values, *lengths, strict=True):
        for token in range(query_len):
            seen = max(0, seq_len - query_len + token + 1)
            newest = (seen - 1) // choice.size
            for head in range(num_kv_heads if seen else 0):
                others = torch.randperm(newest)[: choice.top_k - 1].tolist()
                own = sorted([*others, newest])
                chosen[row, head, : len(own)] = torch.tensor(own)
                places = [p for p in range(seen) if p // choice.size in own]
                heads = slice(head * group, (head + 1) * group)
                weights = batch.q[row, heads].double() @ k[head, places].double().T * batch.scale
                expected[row, heads] = weights.softmax(-1) @ v[head, places].double()
            row += 1
    out = op(batch.q, batch.kv_cache, chosen, metadata, choice, batch.scale, scales)
    assert out.shape == expected.shape and out.dtype == dtype
    assert oracle.relative_error(out, expected) < ATTENTION[dtype]
