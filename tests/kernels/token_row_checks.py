"""Checks kernels of windows beside rows of several tokens, and of residual streams, against the
plain-torch column in float32, which the models' tests compare with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import torch
from kernel_checks import ATTENTION
from sparse_checks import Lengths, index_pages
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import E4M3
from tandem_kernels.attention.token_rows import (
    BackTurn,
    NarrowRows,
    OpenTokens,
    RowPages,
    SeenRows,
    TokenRowForm,
)
from tandem_kernels.attention.window_rows_shapes import attends_ahead
from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.elementwise.norm_forms import Norm
from tandem_kernels.narrow_form import num_exponents
from tandem_kernels.reference import elementwise as plain_elementwise
from tandem_kernels.reference import experts as plain_experts
from tandem_kernels.reference import fp8 as plain_fp8
from tandem_kernels.reference import streams as plain_streams
from tandem_kernels.reference import token_rows as plain
from tandem_kernels.stream_forms import GivenToStreams, StreamForm, StreamWeights

Op = Callable[..., Any]
NAN = float("nan")


def _batch(
    lengths: Lengths, block: int, num_decodes: int, device: str, window: int | None = None
) -> AttentionMetadata:
    """Returns a ragged batch whose blocks are scattered: of each request one more than it has
    tokens for."""
    contexts, queries = lengths
    counts = [-(-length // block) + 1 for length in contexts]
    ids = iter(torch.randperm(sum(counts)).tolist())
    tables = [[next(ids) for _ in range(count)] for count in counts]
    widest = max(map(len, tables))
    rows = [table + [0] * (widest - len(table)) for table in tables]
    return AttentionMetadata(
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor([0, *queries], device=device).cumsum(0).int(),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        num_decodes,
        max(queries),
        max(contexts),
        window=window,
        decode_query_len=queries[0] if num_decodes else 1,
    )


def _filled(metadata: AttentionMetadata, block: int, width: int, counts: list[int]) -> Tensor:
    """Returns pages in which requests have the first `counts` rows, and all else is NaN."""
    tables = metadata.block_tables.cpu()
    pages = torch.full((int(tables.max()) + 1, block, width), NAN)
    for table, count in zip(tables, counts, strict=True):
        places = torch.arange(count)
        pages[table[places // block].long(), places % block] = torch.randn(count, width)
    return pages.to(metadata.block_tables.device)


def _narrow(pages: Tensor, rope: int) -> NarrowRows:
    """Returns the vectors of `pages` [N, B, D] in narrow ones; NaN stays NaN."""
    blocks, size, dim = pages.shape
    count = num_exponents(dim - rope)
    widths = dim - rope, rope * pages.itemsize, count
    memory = torch.full((blocks, size * sum(widths)), 255, dtype=torch.uint8, device=pages.device)
    planes = torch.split(memory, [size * width for width in widths], dim=1)
    rows = NarrowRows(
        *(
            plane.view(kind).view(blocks, size, -1)
            for plane, kind in zip(planes, (E4M3, pages.dtype, torch.uint8), strict=True)
        )
    )
    real = torch.arange(blocks * size, device=pages.device)
    real[pages.flatten(0, 1).isnan().any(1)] = -1
    plain.cache_rows(pages.flatten(0, 1), rows, real)
    return rows


def _same_bytes(found: NarrowRows, expected: NarrowRows) -> bool:
    pairs = zip(_bytes_in(found), _bytes_in(expected), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def _bytes_in(rows: NarrowRows) -> list[Tensor]:
    return [part.contiguous().view(torch.uint8) for part in
            (rows.numbers, rows.rotated, rows.exponents)]  # fmt: skip


def narrow_rows(op: Op, rope: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows of every size of numbers, zeros, and those beside a power of two are written alike."""
    sizes = torch.tensor([1e-6, 0.0, 1.0, 90.0, 2e3, 1.0], device=device)
    x = torch.randn(6, dim, device=device) * sizes[:, None]
    x[5, : dim // 2] = torch.tensor([448.0, 448.1, 3.5, 3.51], device=device).repeat(dim // 8)
    slots = torch.tensor([9, 1, -1, 0, 3, 6], device=device)
    blank = torch.full((3, 4, dim), NAN, device=device, dtype=dtype)
    found, expected = _narrow(blank, rope), _narrow(blank, rope)
    op(x, found, slots)
    plain.cache_rows(x, expected, slots)
    assert _same_bytes(found, expected) and not _same_bytes(found, _narrow(blank, rope))


def _table(rope: int, device: str, length: int = 256) -> Tensor:
    angles = torch.randn(length, rope // 2, device=device)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def shared_rope_and_cache(
    op: Op, sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """`sizes` is (H, D, R). Token 2 writes nothing."""
    num_heads, dim, rope = sizes
    q = torch.randn(5, num_heads, dim, device=device).to(dtype)
    kv = torch.randn(5, dim + 3, device=device).to(dtype)[:, 3:]
    weight, table = torch.randn(dim, device=device), _table(rope, device)
    positions = torch.tensor([3, 0, 8, 9, 1], device=device)
    slots = torch.tensor([7, 0, -1, 18, 5], device=device)
    pages = torch.full((5, 4, dim), NAN, device=device, dtype=dtype)
    rest = weight, positions, table
    found, expected = (q.clone(), pages.clone()), (q.float(), pages.float())
    op(found[0], kv, *rest, found[1], slots, 1e-6)
    plain.shared_rope_and_cache(expected[0], kv.float(), *rest, expected[1], slots, 1e-6)
    written = slots[slots >= 0]
    flat, wide = found[1].flatten(0, 1), expected[1].flatten(0, 1)
    assert oracle.relative_error(found[0], expected[0]) < ATTENTION[dtype]
    assert oracle.relative_error(flat[written], wide[written]) < ATTENTION[dtype]
    assert torch.equal(flat.isnan(), wide.isnan())
    blank, kept = _narrow(pages, rope), _narrow(found[1], rope)
    op(q.clone(), kv, *rest, blank, slots, 1e-6)
    assert _same_bytes(blank, kept), "what narrow pages keep is made of the same vectors"
    alone = pages.clone()
    op(q[:, :0], kv, *rest, alone, slots, 1e-6)
    assert torch.equal(alone.nan_to_num(), found[1].nan_to_num())


def close_rows(
    op: Op,
    lengths: Lengths,
    form: TokenRowForm,
    rope: int,
    num_decodes: int = 0,
    device: str = "cpu",
) -> None:
    """Finds what tokens of former steps have left in pages, and the step's own nowhere."""
    metadata = _batch(lengths, 4, num_decodes, device)
    contexts, queries = lengths
    width = form.first + 2 * form.width + 5
    before = [max(length - count, 0) for length, count in zip(contexts, queries, strict=True)]
    pages = _filled(metadata, 4, width, before)
    num_tokens = sum(queries)
    x = torch.randn(num_tokens, width, device=device)
    firsts = [range(length - n, length) for length, n in zip(contexts, queries, strict=True)]
    places = [max(place, 0) for own in firsts for place in own]
    rows = OpenTokens(pages, torch.arange(num_tokens, device=device), metadata)
    rest = (
        torch.randn(form.tokens, form.width, device=device), torch.randn(form.dim, device=device),
        torch.tensor(places, device=device), _table(rope, device, max(contexts)), 1e-6,
    )  # fmt: skip
    found, expected = op(x, rows, form, *rest), plain.close_rows(x, rows, form, *rest)
    assert expected.any() and not expected.isnan().any()
    assert oracle.relative_error(found, expected) < ATTENTION[torch.float32]
    closes = [
        (place + 1) % form.tokens == 0 and length > 0
        for own, length in zip(firsts, contexts, strict=True)
        for place in own
    ]
    assert found.any(1).tolist() == closes


def keep_open_tokens(op: Op, device: str = "cpu") -> None:
    """Writes each token's row where its slot is, and nowhere else."""
    metadata, x = _batch(([3], [3]), 4, 0, device), torch.randn(3, 40, device=device)
    pages = torch.full((2, 4, 40), NAN, device=device)
    op(x, OpenTokens(pages, torch.tensor([6, -1, 1], device=device), metadata))
    flat = pages.flatten(0, 1)
    assert torch.equal(flat[[6, 1]], x[[0, 2]]) and int(flat.isnan().any(1).sum()) == 6


def closed_slots(op: Op, device: str = "cpu") -> None:
    """Ends rows behind whole ones alone, and none where a token has no slot."""
    slots = torch.tensor([3, -1, 0, 7, 127, 4, *range(240, 520)], device=device)
    closed = [-1 if slot < 0 or (slot + 1) % 4 else slot // 4 for slot in slots.tolist()]
    assert op(slots, 4).tolist() == closed and closed[:5] == [0, -1, -1, 1, 31]
    assert op(slots, 128).tolist() == plain.closed_slots(slots, 128).tolist()
    assert op(slots[:0], 4).tolist() == []


def placed_ids(op: Op, device: str = "cpu") -> None:
    """Tokens without a slot have no id."""
    slots = torch.tensor([7, -1, 0] * 100, device=device)
    ids = torch.arange(1, 301, dtype=torch.int32, device=device)
    expected = [
        -1 if slot < 0 else own for slot, own in zip(slots.tolist(), ids.tolist(), strict=True)
    ]
    found = op(slots, ids)
    assert found.dtype == torch.int64 and found.tolist() == expected
    assert op(slots[:0], ids[:0]).tolist() == []


def cache_rows(op: Op, dtype: torch.dtype, device: str = "cpu") -> None:
    x = torch.randn(4, 40, device=device)
    pages = torch.full((3, 4, 40), NAN, device=device, dtype=dtype)
    slots = torch.tensor([9, -1, 0, 3], device=device)
    expected = pages.clone()
    op(x, pages, slots)
    plain.cache_rows(x, expected, slots)
    assert torch.equal(pages.nan_to_num(7.0), expected.nan_to_num(7.0))


def index_rows(
    op: Op, sizes: tuple[int, int, int], dtype: torch.dtype, *, fp8: bool, device: str = "cpu"
) -> None:
    """Checks queries and keys by their products. `sizes` is (H, D, R); token 2 closes no row."""
    num_heads, dim, rope = sizes
    q = torch.randn(5, num_heads, dim, device=device).to(dtype)
    keys, weights = torch.randn(5, dim, device=device), torch.randn(5, num_heads, device=device)
    positions = torch.tensor([3, 7, 8, 9, 11], device=device)
    slots = torch.tensor([7, 0, -1, 18, 5], device=device)
    table = _table(rope, device)
    products = []
    for one in (op, plain.index_rows):
        pages = index_pages(5, 4, dim, fp8=fp8, device=device)
        queries, scaled = one(q, keys, weights, positions, table, pages, slots)
        stored = pages.keys.float().flatten(0, 1)
        if pages.scales is not None:
            stored = stored * pages.scales.flatten()[:, None]
        written = stored[slots[slots >= 0]]
        assert written.isfinite().all() and int(stored.isnan().any(1).sum()) == len(stored) - 4
        products.append(torch.einsum("thd,sd,th->ths", queries.float(), written, scaled))
    assert oracle.relative_error(*products) < (0.02 if fp8 else ATTENTION[dtype])


def window_rows_attention(
    op: Op,
    in_fp8: Op,
    lengths: Lengths,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    *,
    window: int | None,
    tokens: int = 0,
    top_k: int = 0,
    num_decodes: int = 0,
    narrow_rope: int = 0,
    device: str = "cpu",
) -> None:
    """Attends, and quantises what is found where heads have whole groups of numbers. `sizes` is
    (H, D). `tokens`: of a row; 0: there are none. `top_k`: 0: all rows are seen.
    `narrow_rope`: numbers of a vector that are not in e4m3; 0: none is."""
    (contexts, queries), (num_heads, dim) = lengths, sizes
    metadata = _batch(lengths, 8, num_decodes, device, window)

    def in_pages(vectors: Tensor) -> RowPages:
        return _narrow(vectors, narrow_rope) if narrow_rope else vectors

    pages = in_pages(_filled(metadata, 8, dim, contexts).to(dtype))
    num_tokens = sum(queries)
    q = torch.randn(num_tokens, num_heads, dim, device=device).to(dtype)
    sinks = torch.randn(num_heads, device=device)
    rows = None
    if tokens:
        of_rows = _batch(([-(-n // tokens) for n in contexts], queries), 2, 0, device)
        kept = in_pages(_filled(of_rows, 2, dim, [n // tokens for n in contexts]).to(dtype))
        chosen = _chosen(lengths, tokens, top_k).to(device) if top_k else None
        rows = SeenRows(kept, of_rows.block_tables, tokens, chosen)
    places = [max(end - count + i, 0) for end, count in zip(*lengths, strict=True)
              for i in range(count)]  # fmt: skip
    rope = 64 if dim == 512 else 8
    back = BackTurn(torch.tensor(places, device=device), _table(rope, device, max(contexts)))
    given = q, pages, metadata, dim**-0.5, sinks, rows, back
    found, expected = op(*given), plain.window_rows_attention(*given)
    assert found.isfinite().all()
    assert oracle.relative_error(found, expected) < 2 * ATTENTION[dtype]
    if attends_ahead(q, pages, metadata):
        # Heads of any length are normed and rotated as they are multiplied.
        lengths_of = 9 * torch.rand(num_tokens, num_heads, 1, device=device) + 0.1
        raw = (q * lengths_of).to(dtype), *given[1:], 1e-6
        assert oracle.relative_error(op(*raw), plain.window_rows_attention(*raw)) < (
            2 * ATTENTION[dtype]
        )
    if dim % 128 == 0:
        numbers, scales = in_fp8(*given)
        wide = plain_fp8.dequantise_rows(numbers, scales).view_as(expected)
        assert scales.shape == (num_heads * dim // 128, num_tokens)
        # The largest number of each group takes all that e4m3 has: half a step is 2 ** -4.
        assert 0.01 < oracle.relative_error(wide, expected) < 0.035 + 2 * ATTENTION[dtype]


def _chosen(lengths: Lengths, tokens: int, top_k: int) -> Tensor:
    found = []
    for length, count in zip(*lengths, strict=True):
        for place in range(length - count, length):
            seen = max(place + 1, 0) // tokens
            own = sorted(torch.randperm(seen).tolist()[:top_k])
            found.append(own + [-1] * (top_k - len(own)))
    return torch.tensor(found, dtype=torch.int32)


def route_tokens(op: Op, *, listed: bool, device: str = "cpu") -> None:
    """Roots of softplus scores, of experts that are chosen by a bias or listed by the token's id;
    token 3 is padding, and all scores of token 4 are small."""
    logits = 3 * torch.randn(9, 60, device=device)
    logits[4] -= 24.0
    ids = torch.randint(40, (9,), device=device)
    ids[3] = -1
    bias = None if listed else 0.3 * torch.randn(60, device=device)
    table = torch.rand(40, 60, device=device).argsort(1)[:, :6].int() if listed else None
    how: dict[str, Any] = {"root_softplus": True, "table": table, "scaling": 1.5}
    weights, chosen = op(logits, ids, bias, 6, **how)
    expected, experts = plain_experts.route_tokens(logits, ids, bias, 6, **how)
    assert torch.equal(chosen, experts) and (chosen[3] == -1).all()
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def capped_gates(op: Op, dtype: torch.dtype, device: str = "cpu") -> None:
    x, form = torch.randn(5, 80, device=device).to(dtype), GateForm("capped", 0.4)
    found, expected = op(x, form), plain_elementwise.bounded_gate_and_mul(x, form)
    assert oracle.relative_error(found, expected) < ATTENTION[dtype]
    gate, up = x.double().chunk(2, dim=1)
    wanted = 0.7 * (gate / 0.7).tanh() * gate.sigmoid() * 1.5 * (up / 1.5).tanh()
    assert oracle.relative_error(op(x, GateForm("situ", 1.5, 0.7)), wanted) < ATTENTION[dtype]


def mixed_blocks(
    op: Op, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """`shape` is (n, T, H). Blocks lie in a bank that has room for more."""
    count, num_tokens, width = shape
    bank = torch.randn(count + 2, num_tokens, width, device=device).to(dtype)
    blocks, last = bank[:count], bank[-1]
    query, weight = (torch.randn(width, device=device).to(dtype) for _ in range(2))
    values = torch.cat((blocks, last[None])).double()
    lengths = (values.square().mean(2, keepdim=True) + 1e-5).sqrt()
    scores = (values / lengths * weight.double()) @ query.double() / 4
    shares = scores.softmax(0)
    found = op(blocks, last, query / 4, weight, 1e-5)
    assert found.dtype == dtype and found.shape == (num_tokens, width)
    assert oracle.relative_error(found, (values * shares[..., None]).sum(0)) < ATTENTION[dtype]


def residual_streams(
    read: Op, write: Op, join: Op, shape: tuple[int, int, int], dtype: torch.dtype,
    device: str = "cpu",
) -> None:  # fmt: skip
    """`shape` is (T, n, H)."""
    num_tokens, count, width = shape
    form = StreamForm(8, 1e-6, 1e-6)
    outputs = (2 + count) * count
    weights = (
        0.1 * torch.randn(outputs, count * width, device=device),
        torch.randn(outputs, device=device), torch.randn(3, device=device),
    )  # fmt: skip
    own = torch.randn(shape, device=device).to(dtype)
    found, expected = read(own, *weights, form), plain_streams.read_streams(own, *weights, form)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert oracle.relative_error(ours, theirs) < ATTENTION[dtype]
    x = torch.randn(num_tokens, width, device=device).to(dtype)
    mixed, plainly = own.clone(), own.clone()
    write(mixed, x, *found[1:])
    plain_streams.write_streams(plainly, x, *expected[1:])
    assert oracle.relative_error(mixed, plainly) < ATTENTION[dtype]
    head = weights[0][:count].contiguous(), weights[1][:count], weights[2][:1]
    ours, theirs = join(own, *head, form), plain_streams.join_streams(own, *head, form)
    assert oracle.relative_error(ours, theirs) < ATTENTION[dtype]


def entered_streams(
    ops_of: tuple[Op, Op, Op], shape: tuple[int, int, int], dtype: torch.dtype, *, beside: bool,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Streams [T, n, H] take in what a block gives, and the next block, or the head, reads them;
    the first has nothing in front of it."""
    num_tokens, count, width = shape
    form = StreamForm(8, 1e-6, 1e-6)
    norm = Norm(torch.randn(width, device=device), 1e-5)
    outputs = (2 + count) * count
    block = StreamWeights(
        0.1 * torch.randn(outputs, count * width, device=device),
        torch.randn(outputs, device=device), torch.randn(3, device=device),
    )  # fmt: skip
    head = StreamWeights(block.fn[:count].contiguous(), block.base[:count], block.scale[:1])
    streams = torch.randn(shape, device=device).to(dtype)
    x, other = torch.randn(2, num_tokens, width, device=device).to(dtype)
    of_plain = plain_streams.mix_streams, plain_streams.norm_streams, plain_streams.share_streams

    def entered(
        columns: tuple[Op, Op, Op], given: GivenToStreams | None, weights: StreamWeights
    ) -> tuple[Tensor, ...]:
        mix, normed, share = columns
        mixed, *products = mix(streams.clone(), given, weights)
        found = mixed, normed(mixed, *products, weights, form, norm)
        return found if weights is head else (*found, *share(*products, weights, form, width))

    first = entered(of_plain, None, block)
    given = GivenToStreams(x, other if beside else None, *first[2:])
    for own, weights in ((None, block), (given, block), (given, head)):
        pairs = zip(entered(ops_of, own, weights), entered(of_plain, own, weights), strict=True)
        for ours, theirs in pairs:
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert oracle.relative_error(ours, theirs) < ATTENTION[dtype]
