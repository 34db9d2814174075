"""Checks the indexer and sparse latent attention against float64 and loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernel_oracle as oracle
import torch
from kernel_checks import ATTENTION

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.index_select import SelectedRows
from tandem_kernels.attention.kv_scales import E4M3
from tandem_kernels.attention.ragged_batch import RaggedBatch

Op = Callable[..., Any]
SCORES = {False: 1e-4, True: 1e-3}
"""How near each other two scores may be to be chosen in either order, of the highest: matrix units
of Hopper keep 14 bits of sums of e4m3 products."""
Lengths = tuple[list[int], list[int]]
"""Has lengths of contexts and of queries."""


def index_pages(
    num_blocks: int, block_size: int, dim: int, *, fp8: bool, device: str
) -> IndexPages:
    """Returns pages in which neither keys nor scales are numbers."""
    nan = float("nan")
    if not fp8:
        return IndexPages(torch.full((num_blocks, block_size, dim), nan, device=device))
    keys = torch.full((num_blocks, block_size, dim), 0x7F, dtype=torch.uint8, device=device)
    scales = torch.full((num_blocks, block_size), nan, device=device)
    return IndexPages(keys.view(E4M3), scales)


def index_rope_and_cache(
    op: Op, sizes: tuple[int, int, int], dtype: torch.dtype, *, fp8: bool, device: str = "cpu"
) -> None:
    """Checks keys and queries. `sizes` is (H, D, R); token 2 writes nothing. Of e4m3 numbers scores
    are compared: a number in the middle of two may go to either."""
    num_heads, dim, rope = sizes
    num_tokens, block_size = 5, 4
    q = torch.randn(num_tokens, num_heads, dim, device=device).to(dtype)
    k = (3 * torch.randn(num_tokens, dim, device=device) + 1).to(dtype)
    norm = torch.randn(dim, device=device), torch.randn(dim, device=device)
    head_weights = torch.randn(num_tokens, num_heads, device=device)
    positions = torch.tensor([3, 0, 8, 9, 1], device=device)
    slots = torch.tensor([7, 0, -1, 18, 5], device=device)
    angles = torch.randn(10, rope // 2, device=device).double()
    table = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    pages = index_pages(5, block_size, dim, fp8=fp8, device=device)
    queries, weights = op(q, k, norm, head_weights, positions, table, pages, slots, 1e-6)

    wide = k.double()
    wide = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, False)[:, None] + 1e-6).sqrt()
    keys = _rotated(wide * norm[0].double() + norm[1].double(), table[positions], rope)
    expected = _rotated(q.double(), table[positions][:, None], rope)
    written = slots >= 0
    stored = _stored_keys(pages).flatten(0, 1)
    if not fp8:
        error = oracle.relative_error
        assert error(stored[slots[written]], keys[written]) < ATTENTION[dtype]
        assert error(queries, expected) < ATTENTION[dtype]
        assert torch.equal(weights, head_weights)
    else:
        assert queries.dtype == E4M3 and pages.scales is not None
        scales = pages.scales.flatten()[slots[written]]
        assert torch.equal(scales.log2(), scales.log2().round())
        unscaled = queries.double() * (weights / head_weights).double()[:, :, None]
        products = torch.einsum("thd,sd->ths", unscaled, stored[slots[written]])
        exact = torch.einsum("thd,sd->ths", expected, keys[written])
        assert oracle.relative_error(products, exact) < 0.05
    untouched = torch.ones(len(stored), dtype=torch.bool, device=device)
    untouched[slots[written]] = False
    assert stored[untouched].isnan().all() and stored[slots[written]].isfinite().all()


def index_keys_alone(op: Op, sizes: tuple[int, int, int], device: str = "cpu") -> None:
    """Checks that keys are the same bits with and without queries. `sizes` is (H, D, R)."""
    num_heads, dim, rope = sizes
    q, k = torch.randn(5, num_heads, dim, device=device).half(), torch.randn(5, dim, device=device)
    norm = torch.randn(dim, device=device), torch.randn(dim, device=device)
    weights = torch.randn(5, num_heads, device=device)
    table = torch.randn(5, rope, device=device)
    places = torch.arange(5, device=device)
    stored = []
    for heads in (num_heads, 0):
        pages = index_pages(2, 4, dim, fp8=True, device=device)
        given = q[:, :heads], k.half(), norm, weights[:, :heads], places, table, pages, places, 1e-6
        queries, _ = op(*given)
        assert queries.shape == (5, heads, dim) and pages.scales is not None
        stored.append((pages.keys.view(torch.uint8)[:1], pages.scales[:1]))
    (keys, scales), (keys_alone, scales_alone) = stored
    assert torch.equal(keys, keys_alone) and torch.equal(scales, scales_alone)


def _rotated(x: torch.Tensor, angles: torch.Tensor, rope: int) -> torch.Tensor:
    cos, sin = angles.double().chunk(2, dim=-1)
    first, second = x[..., : rope // 2], x[..., rope // 2 : rope]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*turned, x[..., rope:]), dim=-1)


def _stored_keys(pages: IndexPages) -> torch.Tensor:
    if pages.scales is None:
        return pages.keys.double()
    return pages.keys.double() * pages.scales[:, :, None].double()


def index_topk(
    op: Op,
    lengths: Lengths,
    sizes: tuple[int, int, int],
    *,
    fp8: bool,
    block_size: int = 16,
    num_decodes: int = 0,
    fixed_order: bool = False,
    ties: bool = False,
    tokens: int = 1,
    device: str = "cpu",
) -> torch.Tensor:
    """Checks that every query has chosen the highest scores of its context, and returns what it
    has. `sizes` is (H, D, K). With `ties` all numbers are whole and small, so that scores are exact
    and many are equal: what is chosen must then be the very first of them. `tokens`: that a key
    stands for."""
    num_heads, dim, top_k = sizes
    seq_lens, query_lens = lengths
    metadata, tables = _batch(lengths, block_size, num_decodes, device)
    pages = index_pages(int(tables.max()) + 1, block_size, dim, fp8=fp8, device=device)
    keys = [_numbers((length // tokens, dim), ties, device) for length in seq_lens]
    q = _numbers((sum(query_lens), num_heads, dim), ties, device)
    head_weights = torch.randn(sum(query_lens), num_heads, device=device)
    if ties:
        head_weights = head_weights.round()
    if fp8:
        q = q.to(E4M3)
    for table, rows in zip(tables, keys, strict=True):
        for position, row in enumerate(rows):
            place = int(table[position // block_size]), position % block_size
            pages.keys[place[0]].view(torch.uint8)[place[1]] = row.to(pages.keys.dtype).view(
                torch.uint8
            )
            if pages.scales is not None:
                pages.scales[place] = 1.0 if ties else 2.0 ** (position % 3)
    metadata = replace(metadata, fixed_order=fixed_order)
    chosen: torch.Tensor = op(q, head_weights, pages, metadata, top_k, tokens)
    assert chosen.shape == (len(q), top_k) and chosen.dtype == torch.int32
    stored = _stored_keys(pages)
    row = 0
    for r, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        places = tables[r][torch.arange(seq_len, device=device) // block_size].long()
        of_request = stored[places, torch.arange(seq_len, device=device) % block_size]
        for token in range(query_len):
            seen = max(0, seq_len - query_len + token + 1) // tokens
            found = chosen[row].tolist()
            count = min(top_k, seen)
            own = found[:count]
            assert own == sorted(set(own)) and found[count:] == [-1] * (top_k - count)
            if count:
                products = torch.einsum("hd,sd->hs", q[row].double(), of_request[:seen])
                scores = head_weights[row].double() @ products.relu()
                _check_choice(scores, own, exact=ties, error=SCORES[fp8 and device != "cpu"])
            row += 1
    return chosen


def highest_of_rows(select: Op, top_k: int, width: int, device: str = "cpu") -> None:
    """Checks the choice from rows that a sample says little of: equal scores, more than there may
    be candidates, scores that rise or fall, a few high ones side by side, and no numbers."""
    drawn = torch.randn(width)
    few = torch.where(torch.arange(width) // top_k == 3, drawn.abs() + 9.0, drawn)
    kinds = [
        drawn, drawn.round(), torch.ones(width), torch.zeros(width) * drawn.sign(),
        drawn.clamp(max=-0.5), (drawn > 1.0).float(), (drawn > 2.5).float() - 3.0,
        drawn.cumsum(0), drawn.cumsum(0).flip(0), drawn.abs().cumsum(0), -drawn.abs().cumsum(0),
        few, few.flip(0), drawn * 1e30, drawn * 1e-40, torch.full((width,), float("-inf")),
        torch.full((width,), float("nan")),
    ]  # fmt: skip
    lengths = [width - 5 * index for index in range(len(kinds))]
    lengths += [top_k - 1, top_k, top_k + 1, 2 * top_k, 0]
    scores = torch.stack([*kinds, *kinds[:5]])
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    chosen = torch.full((len(lengths), top_k), -9, dtype=torch.int32, device=device)
    rows = SelectedRows(starts, seq_lens, 0, len(lengths), 1, 1, width)
    select(scores.to(device), rows, chosen)
    for length, own, found in zip(lengths, scores, chosen.tolist(), strict=True):
        best = (own[:length] + 0.0).sort(descending=True, stable=True).indices[:top_k]
        assert found == [*best.sort().values.tolist(), *[-1] * (top_k - len(best))]


def index_topk_is_invariant(
    op: Op,
    lengths: tuple[int, int],
    sizes: tuple[int, int, int],
    *,
    fp8: bool,
    device: str = "cpu",
) -> None:
    """Checks that tokens of one prompt choose the same, bit for bit, in one step, in two chunks,
    each as a decode, and as decodes together. `lengths` are those of context and queries."""
    (seq_len, query_len), (num_heads, dim, top_k), block_size = lengths, sizes, 16
    q = torch.randn(query_len, num_heads, dim, device=device)
    weights = torch.randn(query_len, num_heads, device=device)
    pages = index_pages(-(-seq_len // block_size) + 1, block_size, dim, fp8=fp8, device=device)
    keys = torch.randn(*pages.keys.shape, device=device).to(pages.keys.dtype)
    pages.keys.view(torch.uint8).copy_(keys.view(torch.uint8))
    if pages.scales is not None:
        pages.scales.uniform_(0.5, 2.0)
        q = q.to(E4M3)

    def step(first: int, end: int, *, decodes: bool = False) -> torch.Tensor:
        count, last = end - first, seq_len - query_len + end
        of_each = list(range(last - count + 1, last + 1))
        batch = (of_each, [1] * count) if decodes else ([last], [count])
        metadata, tables = _batch(batch, block_size, count if decodes else 0, device)
        tables.copy_(torch.arange(1, tables.shape[1] + 1))
        found: torch.Tensor = op(q[first:end], weights[first:end], pages, metadata, top_k)
        return found

    whole = step(0, query_len)
    middle = query_len // 3
    assert torch.equal(whole, torch.cat((step(0, middle), step(middle, query_len))))
    alone = [step(i, i + 1, decodes=True) for i in range(query_len)]
    assert torch.equal(whole, torch.cat(alone))
    assert torch.equal(whole, step(0, query_len, decodes=True))


def shared_choices(
    write: Op, choose: Op, sizes: tuple[int, int], lengths: tuple[int, int], device: str = "cpu"
) -> float:
    """Returns which part of what eight tokens choose in float32 they choose in bfloat16 over an
    e4m3 cache as well. `sizes` are (H, D), `lengths` those of the context and of a choice."""
    (num_heads, dim), (seq_len, top_k), rope = sizes, lengths, sizes[1] // 2
    q = torch.randn(seq_len, num_heads, dim, device=device)
    k = torch.randn(seq_len, dim, device=device)
    weights = torch.randn(seq_len, num_heads, device=device)
    norm = torch.ones(dim, device=device), torch.zeros(dim, device=device)
    angles = torch.randn(seq_len, rope // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    metadata, tables = _batch(([seq_len], [8]), 16, 0, device)
    tables.copy_(torch.arange(tables.shape[1]))
    rows = torch.arange(seq_len, device=device)
    chosen = []
    for dtype, fp8 in ((torch.float32, False), (torch.bfloat16, True)):
        pages = index_pages(tables.shape[1], 16, dim, fp8=fp8, device=device)
        inputs = q.to(dtype), k.to(dtype), norm, weights, rows, table, pages, rows, 1e-6
        queries, scaled = write(*inputs)
        chosen.append(choose(queries[-8:], scaled[-8:], pages, metadata, top_k).tolist())
    alike = sum(len(set(a) & set(b)) for a, b in zip(*chosen, strict=True))
    return alike / (8 * top_k)


def _check_choice(scores: torch.Tensor, found: list[int], *, exact: bool, error: float) -> None:
    best = scores.sort(descending=True, stable=True)
    if exact:
        assert found == sorted(best.indices[: len(found)].tolist())
        return
    # Two scores that are nearly equal may be in either order.
    least, most = scores[found].min(), best.values[: len(found)].min()
    assert float(most - least) <= error * float(scores.abs().max())


def _numbers(shape: tuple[int, ...], whole: bool, device: str) -> torch.Tensor:
    if whole:
        return torch.randint(-1, 2, shape, device=device).float()
    return torch.randn(shape, device=device)


def _batch(
    lengths: Lengths, block_size: int, num_decodes: int, device: str
) -> tuple[AttentionMetadata, torch.Tensor]:
    seq_lens, query_lens = lengths
    num_blocks = [-(-length // block_size) for length in seq_lens]
    ids = torch.randperm(sum(num_blocks) + 1).split([*num_blocks, 1])
    tables = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    for table, own in zip(tables, ids, strict=False):
        table[: len(own)] = own
    metadata = AttentionMetadata(
        block_tables=tables.to(device),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        decode_query_len=query_lens[0] if num_decodes else 1,
    )
    return metadata, metadata.block_tables


def sparse_latent_attention(
    op: Op,
    lengths: Lengths,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    num_decodes: int = 0,
    fixed_order: bool = False,
    device: str = "cpu",
) -> None:
    """Checks attention to random tokens of each context. `sizes` is (H, L, R, K)."""
    num_heads, latent, rope, top_k = sizes
    batch = oracle.paged_batch(
        *lengths, num_kv_heads=1, group=num_heads, head_dim=latent + rope, block_size=16,
        dtype=dtype, device=device,
    )  # fmt: skip
    metadata = replace(batch.metadata, fixed_order=fixed_order)
    if num_decodes:
        query_len = lengths[1][0]
        metadata = replace(metadata, num_decodes=num_decodes, decode_query_len=query_len)
    q, cache = batch.q, batch.kv_cache[:, 0, 0]
    chosen = torch.full((len(q), top_k), -1, dtype=torch.int32, device=device)
    expected = torch.zeros(len(q), num_heads, latent, dtype=torch.float64, device=device)
    row = 0
    for keys, seq_len, query_len in zip(batch.keys, *lengths, strict=True):
        for token in range(query_len):
            seen = max(0, seq_len - query_len + token + 1)
            own = torch.randperm(seen)[:top_k].sort().values.to(device)
            chosen[row, : len(own)] = own.int()
            if len(own):
                rows = keys[0, own].double()
                weights = (q[row].double() @ rows.T * batch.scale).softmax(-1)
                expected[row] = weights @ rows[:, :latent]
            row += 1
    out = op(q[:, :, :latent], q[:, :, latent:], cache, chosen, metadata, batch.scale)
    assert out.shape == expected.shape and out.dtype == dtype
    assert oracle.relative_error(out, expected) < ATTENTION[dtype]


def attention_to_chosen_keys(
    attend: Op,
    write: Op,
    lengths: Lengths,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    causal: bool,
    device: str = "cpu",
) -> None:
    """Checks attention to random tokens of contexts of which a part lies here as keys: bits, and
    what they make of `ragged_attention`. `lengths` are those of queries and keys, `sizes` is
    (H, D, V, K). The first query of each request has chosen nothing of what is here."""
    (query_lens, key_lens), (num_heads, key, value, top_k) = lengths, sizes
    first = [5 + 40 * r for r in range(len(key_lens))]
    q, k, v = (
        torch.randn(sum(rows), num_heads, width, device=device).to(dtype)
        for rows, width in ((query_lens, key), (key_lens, key), (key_lens, value))
    )
    bounds = [oracle.cumulative(part).to(device) for part in lengths]
    batch = RaggedBatch(*bounds, max(query_lens), max(key_lens), causal)
    chosen = torch.full((len(q), top_k), -1, dtype=torch.int32)
    expected = torch.zeros(len(q), num_heads, value, dtype=torch.float64, device=device)
    sums = torch.full((num_heads, len(q)), -torch.inf, dtype=torch.float64, device=device)
    places: list[list[int]] = []
    for r, (num_queries, num_keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        for i in range(num_queries):
            seen = num_keys - num_queries + i + 1 if causal else num_keys
            room = first[r] + (seen if i else 0)
            picked = torch.randperm(room)[:top_k].sort().values
            chosen[len(places), : len(picked)] = picked.int()
            own = picked[picked >= first[r]] - first[r]
            if len(own):
                rows, token = sum(key_lens[:r]) + own.to(device), len(places)
                scores = torch.einsum("hd,shd->hs", q[token].double(), k[rows].double())
                scores *= key**-0.5
                expected[token] = torch.einsum("hs,shd->hd", scores.softmax(-1), v[rows].double())
                sums[:, token] = scores.logsumexp(-1)
            places.append(own.tolist())
    begins = torch.tensor(first, dtype=torch.int32, device=device)
    bits = write(chosen.to(device), batch, begins)
    assert bits.dtype == torch.int32 and bits.shape == (len(q), -(-max(key_lens) // 64) * 2)
    for row, own in zip(bits.tolist(), places, strict=True):
        assert [32 * w + i for w, word in enumerate(row) for i in range(32) if word >> i & 1] == own
    out, log_sums = attend(q, k, v, batch, key**-0.5, bits)
    assert out.dtype == dtype and oracle.relative_error(out, expected) < ATTENTION[dtype]
    torch.testing.assert_close(
        log_sums.double(), sums, rtol=ATTENTION[dtype], atol=ATTENTION[dtype]
    )
