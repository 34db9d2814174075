"""Checks what each operation must do, for any column of the dispatch table and any device.

Inputs are fresh random numbers; `op` is the function under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernel_oracle as oracle
import torch
from torch import Tensor

from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import HiddenDecodes
from tandem_kernels.attention.kv_pages import KVPages, apart
from tandem_kernels.attention.kv_scales import E4M3, KVScales
from tandem_kernels.attention.ragged_batch import RaggedBatch
from tandem_kernels.attention.value_form import ValueForm
from tandem_kernels.batch.batch_tables import GroupTables, RowTables, StepInputs, WordTables
from tandem_kernels.elementwise.gate_form import GateForm, has_gate
from tandem_kernels.elementwise.norm_forms import Norm, PairedExperts

Op = Callable[..., Any]

ELEMENTWISE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
ATTENTION = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def embedding(op: Op, num_tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Expects each token's row of a table that begins with token 40, and zeros for others."""
    table = torch.randn(60, width, device=device).to(dtype)
    ids = torch.randint(0, 140, (num_tokens,), dtype=torch.int32, device=device)
    ids[1::2] = ids[1::2] % 60 + 40
    wide = torch.zeros(200, width, dtype=dtype, device=device)
    wide[40:100] = table
    for given in (ids, ids.long()):
        assert torch.equal(op(given, table, 40), wide[given.long()])
    assert torch.equal(op(ids % 60, table), table[(ids % 60).long()])


def rms_norm(op: Op, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    x = (torch.randn(rows, width, device=device) * 3).to(dtype)
    for weight_dtype in {dtype, torch.float32}:
        weight = torch.randn(width, device=device).to(weight_dtype)
        out = op(x, weight, 1e-5)
        assert out.dtype == dtype
        assert oracle.relative_error(out, oracle.rms_norm(x, weight, 1e-5)) < ELEMENTWISE[dtype]


def fused_add_rms_norm(
    op: Op, rows: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """The norm sees what the residual stream carries on: the rounded sum."""
    x = torch.randn(rows, width, device=device).to(dtype)
    residual = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    total = (x.double() + residual.double()).to(dtype)
    normed, carried = op(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(carried, total)
    assert oracle.relative_error(normed, oracle.rms_norm(total, weight, 1e-6)) < ELEMENTWISE[dtype]


def small_m_gemm(
    linear: Op,
    gated: Op,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Checks a GEMM. `shape` is (rows, outputs, inner). Rows of x lie apart, as a slice's do."""
    rows, outputs, inner = shape
    x = torch.randn(rows, 2 * inner, device=device).to(dtype)[:, :inner]
    weight = (torch.randn(outputs, inner, device=device) * inner**-0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    exact = x.double() @ weight.double().t()
    assert oracle.relative_error(linear(x, weight), exact) < ELEMENTWISE[dtype]
    assert oracle.relative_error(linear(x, weight, bias), exact + bias) < ELEMENTWISE[dtype]
    gate, up = exact.to(dtype).double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    assert oracle.relative_error(gated(x, weight), expected) < 2 * ELEMENTWISE[dtype]


def few_row_gemm(
    op: Op, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Checks a GEMM of any size, with all that it may add. `shape` is (rows, outputs, inner). Rows
    of x lie apart, and so do those of the residual stream, in between which nothing changes."""
    rows, outputs, inner = shape
    x = torch.randn(rows, 2 * inner, device=device).to(dtype)[:, :inner]
    weight = (torch.randn(outputs, inner, device=device) * inner**-0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    wide = torch.randn(rows, outputs + 8, device=device).to(dtype)
    before = wide.clone()
    residual = wide[:, :outputs]
    exact = x.double() @ weight.double().t()
    within = ELEMENTWISE[dtype]
    assert oracle.relative_error(op(x, weight), exact) < within
    assert oracle.relative_error(op(x, weight, bias), exact + bias) < within
    logits = op(x, weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert oracle.relative_error(logits, exact) < 1e-5, "sums are not rounded to half precision"
    assert op(x, weight, bias, residual).data_ptr() == residual.data_ptr()
    assert oracle.relative_error(residual, exact + bias + before[:, :outputs]) < within
    assert torch.equal(wide[:, outputs:], before[:, outputs:])


def head_gemm(op: Op, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    """Checks products of each head with weights that lie either way round. `shape` is (rows,
    heads, outputs, inner). Heads of x lie apart."""
    rows, heads, outputs, inner = shape
    x = torch.randn(rows, heads, inner + 8, device=device).to(dtype)[:, :, :inner]
    weight = (torch.randn(heads, inner, outputs, device=device) * inner**-0.5).to(dtype)
    exact = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    for given in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        out = op(x, given)
        assert out.is_contiguous()
        assert oracle.relative_error(out, exact) < ELEMENTWISE[dtype]


def fused_gate_up(
    op: Op, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Checks a gated GEMM. `shape` is (rows, width, inner). Rows of x lie apart; gates reach from 0
    to 100."""
    rows, width, inner = shape
    x = torch.randn(rows, 2 * inner, device=device).to(dtype)[:, :inner]
    weight = torch.randn(2 * width, inner, device=device) * inner**-0.5
    weight[:width] *= torch.logspace(-1, 1.5, width, device=device)[:, None]
    weight = weight.to(dtype)
    exact = x.double() @ weight.double().t()
    gate, up = exact.to(dtype).double().chunk(2, -1)
    found = op(x, weight)
    assert found.shape == (rows, width) and found.dtype == dtype
    assert oracle.relative_error(found, gate * gate.sigmoid() * up) < 2 * ELEMENTWISE[dtype]


def invariant_gemm(
    op: Op, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Checks a GEMM. `shape` is (rows, outputs, inner). A row has the same bits in any company."""
    rows, outputs, inner = shape
    x = torch.randn(rows, 2 * inner, device=device).to(dtype)[:, :inner]
    weight = (torch.randn(outputs, inner, device=device) * inner**-0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    exact = x.double() @ weight.double().t()
    found = op(x, weight, bias)
    assert oracle.relative_error(found, exact + bias) < ELEMENTWISE[dtype]
    wide = op(x, weight, None, torch.float32)
    assert wide.dtype == torch.float32
    assert oracle.relative_error(wide, exact) < 1e-5
    for start, end in ((0, 1), (rows // 2, rows // 2 + 3), (1, rows)):
        assert torch.equal(op(x[start:end], weight, bias), found[start:end])


def silu_and_mul(op: Op, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    x = (torch.randn(rows, 2 * width, device=device) * 4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    out = op(x)
    assert out.shape == (rows, width)
    assert oracle.relative_error(out, gate / (1 + (-gate).exp()) * up) < ELEMENTWISE[dtype]


def bounded_gate_and_mul(
    op: Op, rows: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """All limits are reached."""
    x = 2 * torch.randn(rows, 2 * width, device=device).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    up = up.clip(-1.5, 1.5)
    limited = (gate / (1 + (-gate).exp())).clip(None, 1.5) * up
    gate = gate.clip(None, 1.5)
    clamped = gate / (1 + (-1.7 * gate).exp()) * (up + 1)
    for form, expected in (
        (GateForm("limited", 1.5), limited), (GateForm("clamped", 1.5, 1.7), clamped)
    ):  # fmt: skip
        assert oracle.relative_error(op(x, form), expected) < ELEMENTWISE[dtype]


def relu_squared(op: Op, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows lie apart."""
    x = (torch.randn(rows, 2 * width, device=device) * 4).to(dtype)[:, :width]
    expected = x.double().clip(0.0) ** 2
    assert oracle.relative_error(op(x), expected) < ELEMENTWISE[dtype]


def gelu_tanh_and_mul(
    op: Op, rows: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    x = (torch.randn(rows, 2 * width, device=device) * 4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    out = op(x)
    assert out.shape == (rows, width)
    gelu = 0.5 * gate * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    assert oracle.relative_error(out, gelu * up) < ELEMENTWISE[dtype]


def rope_and_cache(
    op: Op,
    dtype: torch.dtype,
    *,
    head_dim: int,
    num_kv_heads: int = 2,
    group: int = 2,
    num_tokens: int = 6,
    block_size: int = 16,
    head_norm: bool = False,
    keep_k: bool = False,
    device: str = "cpu",
) -> None:
    """Checks with q, k and v as views of one projection; slots are scattered, one token writes
    nothing.
    """
    num_q_heads = num_kv_heads * group
    num_blocks = -(-2 * num_tokens // block_size)
    angles = oracle.rope_angles(64, head_dim)
    projection = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim, device=device)
    q, k, v = projection.to(dtype).split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    positions = torch.randint(0, 64, (num_tokens,), device=device)
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    slots[num_tokens // 2] = -1
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
    kv_cache = torch.full(shape, math.nan, dtype=dtype, device=device)
    weights = [torch.randn(head_dim, device=device).to(dtype) if head_norm else None] * 2

    turned = angles.to(device)[positions]
    expected = []
    for heads, weight in ((q, weights[0]), (k, weights[1])):
        wide = heads if weight is None else oracle.rms_norm(heads, weight, 1e-6)
        expected.append(oracle.rotate(wide, turned))
    cache = oracle.cos_sin_cache(angles).to(device)
    before = k.clone()
    out = op(q, k, v, positions, cache, kv_cache, slots, *weights, 1e-6, keep_k)

    assert out.data_ptr() == q.data_ptr()
    assert oracle.relative_error(out, expected[0]) < ELEMENTWISE[dtype]
    by_slot = kv_cache.permute(0, 3, 1, 2, 4).reshape(-1, 2, num_kv_heads, head_dim)
    written = slots[slots >= 0]
    cached = by_slot[written]
    assert oracle.relative_error(cached[:, 0], expected[1][slots >= 0]) < ELEMENTWISE[dtype]
    assert torch.equal(cached[:, 1], v[slots >= 0])
    assert torch.equal(k[slots >= 0], cached[:, 0] if keep_k else before[slots >= 0])
    others = torch.ones(by_slot.shape[0], dtype=torch.bool, device=device)
    others[written] = False
    assert by_slot[others].isnan().all()


def written_values(
    op: Op, values: ValueForm, dtype: torch.dtype, sizes: tuple[int, int] = (24, 16),
    device: str = "cpu",
) -> None:  # fmt: skip
    """Checks values that are normed or scaled before they are written, of other widths than keys,
    and read from the projection afterwards. `sizes` is (head_dim, value_dim)."""
    (head_dim, value_dim), num_tokens, block_size = sizes, 5, 16
    q, k, v = (
        torch.randn(num_tokens, 3, width, device=device).to(dtype)
        for width in (head_dim, head_dim, value_dim)
    )
    pages = torch.zeros(2, 3 * block_size * (head_dim + value_dim), dtype=dtype, device=device)
    keys, rest = pages.split([3 * block_size * head_dim, 3 * block_size * value_dim], dim=1)
    cache = KVPages(keys.view(2, 3, block_size, -1), rest.view(2, 3, block_size, -1))
    wide = v.double()
    if values.normed:
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = wide * values.scale
    table = torch.cat((torch.ones(9, head_dim // 2), torch.zeros(9, head_dim // 2)), dim=1)
    slots = torch.arange(num_tokens, device=device) + block_size
    before = k.clone()
    places = torch.zeros_like(slots), table.to(device), cache, slots
    op(q, k, v, *places, None, None, 1e-6, True, values=values)
    for found in (v, cache.v[1, :, :num_tokens].transpose(0, 1)):
        assert oracle.relative_error(found, expected) < ELEMENTWISE[dtype]
    assert torch.equal(cache.k[1, :, :num_tokens].transpose(0, 1), before)


def paged_attention(op: Op, batch: oracle.PagedBatch) -> None:
    out = op(batch.q, batch.kv_cache, batch.metadata, batch.scale, batch.softcap, batch.sinks)
    assert out.dtype == batch.q.dtype
    assert oracle.relative_error(out, batch.expected()) < ATTENTION[out.dtype]


def hidden_decodes(
    op: Op, seq_lens: list[int], query_lens: list[int], num_padded: int, **shape: Any
) -> None:
    """A recorded step knows none of its decodes, nor how many requests are padding, and has room
    for more tokens than there are. Each request counts its sinks once."""
    batch = oracle.paged_batch(seq_lens, query_lens, **shape)
    batch.sinks = torch.linspace(-3, 3, batch.q.shape[1], device=batch.q.device)
    expected, num_tokens = batch.expected(), len(batch.q)
    _hide_decodes(batch, num_padded)
    out = op(batch.q, batch.kv_cache, batch.metadata, batch.scale, 0.0, batch.sinks)
    assert oracle.relative_error(out[:num_tokens], expected) < ATTENTION[out.dtype]


def hidden_decodes_of_latents(
    op: Op, lengths: tuple[list[int], list[int]], num_padded: int, sizes: tuple[int, int, int],
    **shape: Any,
) -> None:  # fmt: skip
    """Checks the same of latents; `lengths` and `sizes` as in `latent_attention`."""
    num_heads, latent, rope = sizes
    batch = oracle.paged_batch(
        *lengths, num_kv_heads=1, group=num_heads, head_dim=latent + rope, block_size=16, **shape
    )
    batch.values = [keys[:, :, :latent] for keys in batch.keys]
    expected, num_tokens = batch.expected(latent), len(batch.q)
    _hide_decodes(batch, num_padded)
    q, cache = batch.q, batch.kv_cache[:, 0, 0]
    out = op(q[:, :, :latent], q[:, :, latent:], cache, batch.metadata, batch.scale)
    assert oracle.relative_error(out[:num_tokens], expected) < ATTENTION[out.dtype]


def _hide_decodes(batch: oracle.PagedBatch, num_padded: int) -> None:
    """Makes of a batch what a recorded step is told of it."""
    known, device = batch.metadata, batch.q.device
    padding = torch.zeros(num_padded, dtype=torch.int32, device=device)
    seq_lens = torch.cat([known.seq_lens, padding])
    starts = torch.cat([known.query_start_loc, padding + len(batch.q)])
    tables = known.block_tables.new_full((len(seq_lens), known.block_tables.shape[1]), 2**30)
    tables[: len(known.seq_lens)] = known.block_tables
    room = max(len(batch.q), len(seq_lens)) + 5
    batch.metadata = replace(
        known,
        block_tables=tables,
        query_start_loc=starts,
        seq_lens=seq_lens,
        num_decodes=0,
        max_query_len=room - len(seq_lens) + 1,
        max_seq_len=room,
        hidden=HiddenDecodes.of(starts, seq_lens),
    )
    q = batch.q.new_zeros((room, *batch.q.shape[1:]))
    q[: len(batch.q)] = batch.q
    batch.q = q


def attention_with_sinks(
    op: Op,
    seq_lens: list[int],
    query_lens: list[int],
    *,
    device: str = "cpu",
    fixed_order: bool = False,
    **shape: Any,
) -> None:
    """A sink may take nearly all or nothing of a head, and it takes its share once."""
    batch = oracle.paged_batch(seq_lens, query_lens, device=device, **shape)
    num_heads = batch.q.shape[1]
    sinks = torch.linspace(-3, 6, num_heads, device=device)
    sinks[-1] = -math.inf
    batch.sinks = sinks
    batch.metadata = replace(batch.metadata, fixed_order=fixed_order)
    paged_attention(op, batch)
    if num_heads > 1:
        batch.sinks = sinks.clone()
        batch.sinks[0] = 1000.0
        out = op(batch.q, batch.kv_cache, batch.metadata, batch.scale, 0.0, batch.sinks)
        assert not out[:, 0].any()


def attention_in_fixed_order(
    op: Op, dtype: torch.dtype, block_size: int, device: str = "cpu"
) -> None:
    shape = {"num_kv_heads": 2, "group": 4, "head_dim": 64, "block_size": block_size}
    lengths = [70, 300, 1, 33]
    batch = oracle.paged_batch(lengths, lengths, **shape, dtype=dtype, device=device)
    same_bits_in_pieces(op, batch, lengths, batch.expected(), device)


def same_bits_in_pieces(
    op: Op, batch: oracle.PagedBatch, lengths: list[int], expected: Tensor, device: str
) -> None:
    """A request's tokens get the same bits alone and together, whole and in pieces."""
    metadata = replace(batch.metadata, fixed_order=True)
    together = op(batch.q, batch.kv_cache, metadata, batch.scale)
    assert oracle.relative_error(together, expected) < ATTENTION[batch.q.dtype]
    for r, length in enumerate(lengths):
        begin = sum(lengths[:r])
        for first, last in ((0, length), (length - 1, length), (length // 3, 2 * length // 3)):
            if first == last:
                continue
            part = replace(
                metadata,
                block_tables=metadata.block_tables[r : r + 1],
                query_start_loc=torch.tensor([0, last - first], device=device).int(),
                seq_lens=torch.tensor([last], device=device).int(),
                num_decodes=int(last - first == 1),
                max_query_len=last - first,
                max_seq_len=last,
            )
            rows = slice(begin + first, begin + last)
            alone = op(batch.q[rows], batch.kv_cache, part, batch.scale)
            assert torch.equal(alone, together[rows])


NUM_ROWS, MAX_LEN, MAX_TOKENS, BLOCK_SIZE = 6, 40, 64, 4
MAX_DRAFTS = 3
MAX_BLOCKS = -(-(MAX_LEN + MAX_DRAFTS) // BLOCK_SIZE)


def make_rows(seed: int, device: str = "cpu") -> RowTables:
    """Makes rows, half of them with drafts."""
    torch.manual_seed(seed)
    total_len = torch.randint(1, MAX_LEN, (NUM_ROWS,)).int()
    block_table = torch.randperm(NUM_ROWS * MAX_BLOCKS).view(NUM_ROWS, MAX_BLOCKS).int()
    return RowTables(
        token_ids=torch.randint(0, 1000, (NUM_ROWS, MAX_LEN)).int().to(device),
        num_computed=(torch.rand(NUM_ROWS) * total_len).int().to(device),
        total_len=total_len.to(device),
        max_len=torch.randint(1, MAX_LEN + 1, (NUM_ROWS,)).int().to(device),
        block_table=block_table.to(device),
        block_size=BLOCK_SIZE,
        max_drafts=MAX_DRAFTS * (seed % 2),
    )


def make_inputs(device: str = "cpu") -> StepInputs:
    """Makes poisoned inputs, so that a place nobody writes shows."""
    return StepInputs(
        input_ids=torch.full((MAX_TOKENS,), -99, dtype=torch.int32, device=device),
        positions=torch.full((MAX_TOKENS,), -99, device=device),
        slot_mapping=torch.full((MAX_TOKENS,), -99, device=device),
        seq_lens=torch.full((NUM_ROWS,), -99, dtype=torch.int32, device=device),
        block_tables=torch.full((NUM_ROWS, MAX_BLOCKS), -99, dtype=torch.int32, device=device),
    )


def prepare_inputs(
    op: Op, lengths: list[int], padding: int, seed: int, device: str = "cpu"
) -> None:
    """Checks `padding` requests behind those of `lengths`, at most `NUM_ROWS` in all."""
    rows, inputs = make_rows(seed, device), make_inputs(device)
    halves = torch.randperm(2 * NUM_ROWS * MAX_BLOCKS).view(NUM_ROWS, -1).int().to(device)
    other = replace(rows, block_table=halves, block_size=BLOCK_SIZE // 2)
    places = torch.full((MAX_TOKENS,), -99, device=device)
    of_other = replace(inputs, slot_mapping=places, block_tables=torch.full_like(halves, -99))
    mapping = torch.randperm(NUM_ROWS)[: len(lengths)].tolist()
    idx_mapping = torch.tensor(mapping + [-1] * padding, dtype=torch.int32, device=device)
    bounds = oracle.cumulative(lengths + [0] * padding).to(device)
    op(idx_mapping, bounds, GroupTables.of((rows, other), (inputs, of_other)))
    halves, places, half = halves.cpu(), places.cpu(), BLOCK_SIZE // 2

    got = StepInputs(*(getattr(inputs, name).cpu() for name in StepInputs.__slots__))
    tables = rows.token_ids.cpu(), rows.block_table.cpu(), rows.num_computed.cpu()
    token_ids, block_table, num_computed = tables
    token = 0
    for r, length in enumerate(lengths):
        row, limit = mapping[r], int(rows.max_len[mapping[r]])
        for i in range(length):
            position = int(num_computed[row]) + i
            slot = slot_of_other = -1
            if position < MAX_LEN:
                assert got.positions[token] == position
                assert got.input_ids[token] == token_ids[row, position]
            if int(num_computed[row]) < limit and position < limit + rows.max_drafts:
                slot = int(block_table[row, position // BLOCK_SIZE]) * BLOCK_SIZE
                slot += position % BLOCK_SIZE
                slot_of_other = int(halves[row, position // half]) * half + position % half
            assert got.slot_mapping[token] == slot
            assert places[token] == slot_of_other
            assert 0 <= got.positions[token] < MAX_LEN
            assert 0 <= got.input_ids[token] < 1000
            token += 1
        seq_len = min(int(num_computed[row]) + length, limit + rows.max_drafts)
        assert got.seq_lens[r] == seq_len
        used = -(-seq_len // BLOCK_SIZE)
        assert torch.equal(got.block_tables[r, :used], block_table[row, :used])
        used = -(-seq_len // half)
        assert torch.equal(of_other.block_tables[r, :used].cpu(), halves[row, :used])
    assert (got.slot_mapping[token:] == -1).all() and (places[token:] == -1).all()
    assert (got.positions[token:] == 0).all()
    assert (got.seq_lens[len(lengths) :] == 0).all()


def post_update(op: Op, lengths: list[int], seed: int, width: int, device: str = "cpu") -> None:
    """The last request is padding; the others get up to `width` tokens. States of the first one
    take its tokens in later."""
    taken = torch.full((NUM_ROWS,), -7, dtype=torch.int32, device=device)
    rows = replace(make_rows(seed, device), num_taken=taken)
    expected_taken = taken.tolist()
    mapping = torch.randperm(NUM_ROWS)[: len(lengths)].tolist()
    mapping[-1], lengths = -1, [*lengths[:-1], 0]
    sampled = torch.randint(0, 1000, (len(lengths), width))
    counts = torch.randint(0, width + 1, (len(lengths), 1))
    sampled[torch.arange(width) >= counts] = -1
    tokens, computed = rows.token_ids.tolist(), rows.num_computed.tolist()
    totals, limits = rows.total_len.tolist(), rows.max_len.tolist()
    for r, row in enumerate(mapping):
        if row < 0:
            continue
        for token in sampled[r].tolist():
            if token >= 0 and totals[row] < limits[row]:
                tokens[row][totals[row]] = token
                totals[row] += 1
        expected_taken[row] = computed[row] + lengths[r] * (r > 0)
        computed[row] = min(computed[row] + lengths[r], totals[row] - 1)
        if totals[row] >= limits[row]:
            computed[row] = limits[row]

    idx_mapping = torch.tensor(mapping, dtype=torch.int32, device=device)
    bounds = oracle.cumulative(lengths).to(device)
    op(idx_mapping, bounds, sampled.to(device), rows, 1)
    assert rows.token_ids.tolist() == tokens
    assert rows.num_computed.tolist() == computed
    assert rows.total_len.tolist() == totals
    assert taken.tolist() == expected_taken


def write_drafts(op: Op, num_reqs: int, seed: int, device: str = "cpu") -> None:
    """Checks a step of one padding request and `num_reqs` others, some at the end of the table.
    Drafts are columns of a wider table."""
    rows = make_rows(seed, device)
    rows.total_len[: NUM_ROWS // 2] = MAX_LEN - torch.arange(NUM_ROWS // 2).int().to(device)
    mapping = [*torch.randperm(NUM_ROWS)[:num_reqs].tolist(), -1]
    vocab_size = 1000
    drafts = torch.randint(0, vocab_size, (num_reqs + 1, MAX_DRAFTS))
    drafts[0, 0], drafts[-2, 1], drafts[-2, 2] = vocab_size, -5, 2**40
    expected = rows.token_ids.tolist()
    for row, proposed in zip(mapping[:-1], drafts.tolist(), strict=False):
        for k, token in enumerate(proposed):
            if int(rows.total_len[row]) + k < MAX_LEN:
                expected[row][int(rows.total_len[row]) + k] = token if 0 <= token < 1000 else 0
    idx_mapping = torch.tensor(mapping, dtype=torch.int32, device=device)
    wider = torch.cat((drafts, drafts + 1), dim=1).to(device)
    op(idx_mapping, wider[:, :MAX_DRAFTS], vocab_size, rows)
    assert rows.token_ids.tolist() == expected


def write_pieces(
    op: Op, pieces: list[tuple[int, int]], width: int, seed: int, device: str = "cpu"
) -> None:
    """Writes pieces to tables of int32, int64 and float32 in turn. `pieces` are (start, length) of
    one piece each, in numbers, in rows of their own."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = torch.int32, torch.int64, torch.float32
    tables = [
        torch.randint(0, 100, (len(pieces) + 2, width), generator=generator).to(dtype)
        for dtype in dtypes
    ]
    expected = [table.clone() for table in tables]
    described: list[tuple[int, int, int, int]] = []
    words: list[Tensor] = []
    at = 8 * len(pieces)
    rows = torch.randperm(len(pieces) + 2, generator=generator).tolist()
    for i, (start, length) in enumerate(pieces):
        table, row = i % len(dtypes), rows[i]
        written = torch.randint(-(2**20), 2**20, (length,), generator=generator).to(dtypes[table])
        expected[table][row, start : start + length] = written
        words.append(written.view(torch.int32))
        ratio = dtypes[table].itemsize // 4
        described.append((table, (row * width + start) * ratio, at, length * ratio))
        at += length * ratio
    head = torch.tensor(described, dtype=torch.int64).view(-1).view(torch.int32)
    packed = torch.cat([head, *words])
    longest = max((count for *_, count in described), default=0)
    on_device = [table.to(device) for table in tables]
    there = WordTables.of(on_device)
    op(there.addresses, there.words, packed.to(device), len(pieces), longest)
    for table, wanted in zip(on_device, expected, strict=True):
        assert torch.equal(table.cpu(), wanted)


def copy_blocks(op: Op, page_bytes: int, num_copies: int, device: str = "cpu") -> None:
    """Copies blocks of all slots. Sources repeat, as the one that several requests copy does, and
    pairs without a source are none."""
    num_slots, num_targets = 3, 2 * num_copies
    pages = torch.randint(0, 256, (num_slots, num_targets + 3, page_bytes), dtype=torch.uint8)
    targets = torch.randperm(num_targets)[:num_copies]
    sources = num_targets + torch.randint(0, 3, (num_copies,))
    sources[1::4] = -1
    expected = pages.clone()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for slot in range(num_slots if source >= 0 else 0):
            expected[slot, target] = pages[slot, source]
    pages = pages.to(device)
    op(pages, torch.stack([sources, targets], dim=1).int().to(device))
    assert torch.equal(pages.cpu(), expected)


def sampling_parameters(rows: int, device: str = "cpu") -> list[Tensor]:
    """Every combination of filters occurs; a quarter of the rows is greedy."""
    temperature = 0.2 + torch.rand(rows) * 1.5
    temperature[::4] = 0.0
    top_k = torch.randint(1, 50, (rows,), dtype=torch.int32)
    top_k[torch.rand(rows) < 0.5] = 0
    top_p = 0.1 + torch.rand(rows) * 0.9
    top_p[torch.rand(rows) < 0.4] = 1.0
    min_p = torch.rand(rows) * 0.2
    min_p[torch.rand(rows) < 0.5] = 0.0
    seeds = torch.randint(-(2**62), 2**62, (rows,))
    positions = torch.randint(0, 2**17, (rows,))
    columns = [temperature, top_k, top_p, min_p, seeds, positions]
    return [column.to(device) for column in columns]


def pick_parameters(op: Callable[..., Any], num_places: int, device: str = "cpu") -> None:
    """Expects the columns of each place's row, and those of the first where there is none."""
    num_rows = 300
    floats = torch.randn(3, num_rows, device=device)
    top_k = torch.randint(0, 99, (num_rows,), dtype=torch.int32, device=device)
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), device=device)
    rows = torch.randint(-1, num_rows, (num_places,), dtype=torch.int32, device=device)
    seq_lens = torch.randint(0, 2**30, (num_places,), dtype=torch.int32, device=device)
    picked = op(rows, seq_lens, floats, top_k, seeds)
    own = [max(row, 0) for row in rows.tolist()]
    expected = floats[:, own], top_k[own], seeds[own], seq_lens.long()
    for found, wanted in zip(picked, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def sample(op: Op, logits: Tensor) -> None:
    """Expects the same tokens as the reference, which its own tests tie to the definition.

    Two columns may round a logarithm differently, so another token counts as equal when its
    noisy logit is the same within float32, or when it is the last that a filter keeps.
    """
    columns = sampling_parameters(logits.shape[0], str(logits.device))
    got = op(logits, *columns).cpu()
    on_cpu = [column.cpu() for column in columns]
    expected = ops.sample.reference(logits.cpu(), *on_cpu)
    differing = (got != expected).nonzero().squeeze(1).tolist()
    assert len(differing) <= max(1, logits.shape[0] // 50), (got, expected)
    unfiltered = [
        on_cpu[0],
        torch.zeros_like(on_cpu[1]),
        torch.ones(len(got)),
        torch.zeros(len(got)),
    ]
    plain = [column.to(logits.device) for column in (*unfiltered, *on_cpu[4:])]
    assert torch.equal(op(logits, *plain), op(logits, *plain, has_filters=False))
    for row in differing:
        exact = [column[row].item() for column in on_cpu]
        scores = []
        for token in (int(got[row]), int(expected[row])):
            x = logits[row, token].item()
            noise = oracle.gumbel(int(exact[4]), int(exact[5]), token)
            scores.append(x / exact[0] + noise if exact[0] > 0 else x)
        assert math.isclose(*scores, abs_tol=1e-4), (row, scores, exact)


def sample_parts(sample_part: Op, best_of_parts: Op, logits: Tensor, widths: list[int]) -> None:
    """Expects of parts of the vocabulary what the reference draws from whole rows, or a token that
    is as good within float32."""
    rows, device = len(logits), logits.device
    temperature, _, _, _, seeds, positions = sampling_parameters(rows, str(device))
    starts = [sum(widths[:i]) for i in range(len(widths))]
    parts = [
        sample_part(logits[:, start : start + width], temperature, seeds, positions, start)
        for start, width in zip(starts, widths, strict=True)
    ]
    got = best_of_parts(torch.stack(parts)).cpu()
    assert got.dtype == torch.int64
    t, seeds, positions = temperature.cpu(), seeds.cpu(), positions.cpu()
    none, ones = torch.zeros(rows), torch.ones(rows)
    known = t, none.int(), ones, none, seeds, positions
    expected = ops.sample.reference(logits.cpu(), *known, has_filters=False)
    differing = (got != expected).nonzero().squeeze(1).tolist()
    assert len(differing) <= rows // 16, (got, expected)
    for row in differing:
        assert t[row] > 0, "the largest is the largest"
        noises = [
            oracle.gumbel(int(seeds[row]), int(positions[row]), int(of[row]))
            for of in (got, expected)
        ]
        scores = [
            logits[row, of[row]].item() / t[row].item() + noise
            for of, noise in zip((got, expected), noises, strict=True)
        ]
        assert math.isclose(*scores, abs_tol=1e-4), (row, scores)


def topk_logprobs(op: Op, logits: Tensor, k: int) -> None:
    rows, vocab_size = logits.shape
    chosen = torch.randint(0, vocab_size, (rows,), device=logits.device)
    chosen[0] = logits[0].argmax()
    ids, logprobs, ranks = op(logits, chosen, k)
    exact = logits.double().log_softmax(-1)
    assert ids.shape == (rows, 1 + k)
    assert torch.equal(ids[:, 0], chosen)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids), rtol=1e-5, atol=2e-5)
    best = exact.topk(k).values
    torch.testing.assert_close(logprobs[:, 1:].double(), best, rtol=1e-5, atol=2e-5)
    own = logits.gather(1, chosen[:, None])
    assert torch.equal(ranks, 1 + (logits > own).sum(-1))


def apply_penalties(
    op: Op, rows: int, vocab_size: int, num_drafts: int, device: str = "cpu"
) -> None:
    tables = 3
    counts = torch.randint(0, 4, (tables, vocab_size), dtype=torch.int32)
    counts[torch.rand(tables, vocab_size) < 0.8] = 0
    in_prompt = torch.rand(tables, vocab_size) < 0.1
    mask = _packed(in_prompt)
    logits = torch.randn(rows, vocab_size)
    chosen = torch.randint(-1, tables, (rows,), dtype=torch.int32)
    repetition, presence, frequency = torch.rand(3, rows) + torch.tensor([[0.6], [-0.3], [-0.2]])
    drafts = torch.randint(-1, 5, (rows, num_drafts), dtype=torch.int32)

    x, used = logits.double(), counts[chosen].double()
    for s, draft in enumerate(drafts.tolist()):
        for token in draft:
            used[s, token] += token >= 0
    seen = in_prompt[chosen] | (used > 0)
    factor = torch.where(seen, repetition.double()[:, None], 1.0)
    expected = torch.where(x > 0, x / factor, x * factor)
    expected -= frequency.double()[:, None] * used + presence.double()[:, None] * (used > 0)
    expected[chosen < 0] = x[chosen < 0]
    params = (repetition, presence, frequency)
    given = [t.to(device) for t in (logits, mask, counts, chosen, *params, drafts)]
    op(*given)
    assert oracle.relative_error(given[0].cpu(), expected) < 1e-6


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Returns [N, ceil(V / 32)] int32 of `bits` [N, V]."""
    padded = torch.zeros(len(bits), -(-bits.shape[1] // 32), 32, dtype=torch.int64)
    padded.flatten(1)[:, : bits.shape[1]] = bits.long()
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def mask_logits(op: Op, rows: int, vocab_size: int, device: str = "cpu") -> None:
    """Masks of any density, one that allows nothing, and rows without one. Logits are a slice of a
    wider table, as those that a graph writes are."""
    density = torch.tensor([0.0, 0.001, 0.5, 1.0])
    allowed = torch.rand(4, vocab_size) < density[:, None]
    entries = torch.arange(rows, dtype=torch.int32) % 5 - 1
    wide = torch.randn(rows, vocab_size + 16)
    expected = wide.clone()
    for row, entry in enumerate(entries.tolist()):
        if entry >= 0:
            expected[row, :vocab_size][~allowed[entry]] = -torch.inf
    given = wide.to(device)
    op(given[:, :vocab_size], _packed(allowed).to(device), entries.to(device))
    assert torch.equal(given.cpu(), expected)


def sparse_additions(add_sparse: Op, count_tokens: Op, device: str = "cpu") -> None:
    """Repeats add up; -1 is skipped; -inf masks."""
    counts = torch.zeros(2, 5, dtype=torch.int32, device=device)
    rows = torch.tensor([0, 1, -1, 1, 1], dtype=torch.int32, device=device)
    count_tokens(counts, rows, torch.tensor([3, 2, 4, 2, -1], device=device))
    assert counts.tolist() == [[0, 0, 0, 1, 0], [0, 0, 2, 0, 0]]

    logits = torch.zeros(2, 4, device=device)
    row_ids = torch.tensor([0, 0, 1], dtype=torch.int32, device=device)
    cols = torch.tensor([1, 1, 2], dtype=torch.int32, device=device)
    add_sparse(logits, row_ids, cols, torch.tensor([1.0, 0.5, -math.inf], device=device))
    assert logits.tolist() == [[0, 1.5, 0, 0], [0, 0, -math.inf, 0]]


ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"top_k": 2},
    "qwen": {"top_k": 8, "renormalise": False},
    "deepseek_v2": {
        "top_k": 6, "renormalise": False, "scaling": 16.0, "num_groups": 8, "top_groups": 3,
    },
    "deepseek_v3": {
        "top_k": 8, "sigmoid": True, "scaling": 2.5, "num_groups": 8, "top_groups": 4, "bias": True,
    },
    "glm": {"top_k": 8, "sigmoid": True, "bias": True},
    "gpt_oss": {"top_k": 4, "logit_bias": True},
    "gemma4": {"top_k": 8, "scales": True},
}  # fmt: skip
"""Variants of the router, by who uses them."""


def route_tokens(op: Op, name: str, num_experts: int, device: str = "cpu") -> None:
    """One token at a time, in float64; token 1 is padding."""
    options = dict(ROUTERS[name])
    has_bias, has_logit_bias = options.pop("bias", False), options.pop("logit_bias", False)
    logits = torch.randn(7, num_experts, device=device) * 3
    bias = torch.randn(num_experts, device=device) if has_bias else None
    slots = torch.arange(7, device=device)
    slots[1] = -1
    of_logits = torch.randn(num_experts, device=device) * 2 if has_logit_bias else None
    scales = 0.5 + torch.rand(num_experts, device=device) if options.pop("scales", False) else None
    more = {"logit_bias": of_logits, "expert_scales": scales}
    weights, experts = op(logits, slots, bias, **options, **more)
    logits = logits if of_logits is None else logits + of_logits
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    assert experts[1].tolist() == [-1] * options["top_k"] and not weights[1].any()
    for token in (0, *range(2, 7)):
        expected = oracle.route_token(logits[token], bias, **options)
        if scales is not None:
            expected = {expert: w * float(scales[expert]) for expert, w in expected.items()}
        assert experts[token].tolist() == list(expected)
        found = weights[token].double().cpu()
        torch.testing.assert_close(
            found, torch.tensor(list(expected.values()), dtype=torch.float64), rtol=1e-5, atol=1e-6
        )


def route_to_own_experts(op: Op, device: str = "cpu") -> None:
    """Two ranks; the first has experts 0 to 2, the second the others and a copy of number 1, which
    takes every second token. Token 4 is padding."""
    logits = torch.randn(9, 6, device=device) * 3
    slots = torch.arange(9, device=device)
    slots[4] = -1
    weights, chosen = op(logits, slots, None, 3)
    first = torch.tensor([[0, 1, 2, -1, -1, -1], [0, -1, 2, -1, -1, -1]], dtype=torch.int32)
    second = torch.tensor([[-1, -1, -1, 0, 1, 2], [-1, 3, -1, 0, 1, 2]], dtype=torch.int32)
    found = []
    for table in (first, second):
        loads = torch.full((4,), 5, dtype=torch.int64, device=device)
        same, own = op(logits, slots, None, 3, own_numbers=table.to(device), loads=loads)
        assert torch.equal(same, weights)
        assert loads.tolist() == [5 + int((own == number).sum()) for number in range(4)]
        found.append(own)
    assert all((own[4] == -1).all() for own in found)
    for token in (0, 1, 2, 3, 5, 6, 7, 8):
        for place in range(3):
            expert, numbers = int(chosen[token, place]), [int(own[token, place]) for own in found]
            copies = [int(table[token % 2, expert]) for table in (first, second)]
            assert numbers == copies and sum(number >= 0 for number in numbers) == 1


GATES: dict[str, GateForm | None] = {
    "silu": None,
    "clamped": GateForm("clamped", limit=1.25, alpha=1.702),
    "gelu": GateForm("gelu_tanh"),
    "limited": GateForm("limited", limit=0.75),
    "squared": GateForm("relu_squared"),
}
"""Limits are reached."""


def experts_beside(
    op: Op,
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    gate: GateForm | None = None,
) -> None:
    """Checks a shared expert in the launches of the others, against both by themselves. `shape` is
    (T, k, E, H, I, S)."""
    num_tokens, top_k, num_experts, hidden, width, shared = shape

    def randn(*size: int) -> Tensor:
        return (torch.randn(size, device=device) * size[-1] ** -0.5).to(dtype)

    x, parts = torch.randn(num_tokens, hidden, device=device).to(dtype), 1 + has_gate(gate)
    w13, w2 = randn(num_experts, parts * width, hidden), randn(num_experts, hidden, width)
    own13, own2 = randn(parts * shared, hidden), randn(hidden, shared)
    weights = torch.rand(num_tokens, top_k, device=device)
    chosen = torch.rand(num_tokens, num_experts, device=device).argsort(-1)[:, :top_k].int()
    chosen[num_tokens // 3, top_k - 1 if num_tokens == 1 else 0 :] = -1
    found, beside = op(x, w13, w2, weights, chosen, own13, own2, gate)
    assert found.dtype == beside.dtype == dtype
    alone = ops.fused_experts(x, w13, w2, weights, chosen, True, gate=gate, summed=False)
    total, expected = ops.sum_pairs(found, chosen), ops.sum_pairs(alone, chosen)
    assert oracle.relative_error(total, expected) < 2 * ELEMENTWISE[dtype]
    everywhere = torch.zeros(num_tokens, 1, device=device)
    one = oracle.experts(x, own13[None], own2[None], everywhere + 1, everywhere.int(), form=gate)
    assert oracle.relative_error(beside, one) < 2 * ELEMENTWISE[dtype]


def fused_experts(
    op: Op,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    gate: GateForm | None = None,
) -> None:
    """Checks the experts of a step. `shape` is (T, k, E, H, I). Some pairs go nowhere; in fixed
    order rows have the same bits in any company. With a gate there are biases, too."""
    num_tokens, top_k, num_experts, hidden, width = shape
    rows = width * (1 + has_gate(gate))
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    w13 = (torch.randn(num_experts, rows, hidden, device=device) * hidden**-0.5).to(dtype)
    w2 = (torch.randn(num_experts, hidden, width, device=device) * width**-0.5).to(dtype)
    weights = torch.rand(num_tokens, top_k, device=device)
    chosen = torch.rand(num_tokens, num_experts, device=device).argsort(-1)[:, :top_k].int()
    chosen[num_tokens // 3] = -1
    more: dict[str, Any] = {}
    expected = oracle.experts(x, w13, w2, weights, chosen) if gate is None else x
    if gate is not None:
        b13, b2 = (
            torch.randn(num_experts, size, device=device).to(dtype) for size in (rows, hidden)
        )
        more = {"b13": b13, "b2": b2, "gate": gate}
        expected = oracle.experts(x, w13, w2, weights, chosen, b13, b2, gate)
        without_b2 = op(x, w13, w2, weights, chosen, **{**more, "b2": None})
        apart = oracle.experts(x, w13, w2, weights, chosen, b13, None, gate)
        assert oracle.relative_error(without_b2, apart) < 2 * ELEMENTWISE[dtype]
    found = op(x, w13, w2, weights, chosen, **more)
    assert found.dtype == dtype
    assert not found[num_tokens // 3].any()
    parts = op(x, w13, w2, weights, chosen, **more, summed=False)
    assert oracle.relative_error(ops.sum_pairs(parts, chosen), expected) < 2 * ELEMENTWISE[dtype]
    assert oracle.relative_error(found, expected) < 2 * ELEMENTWISE[dtype]
    fixed = op(x, w13, w2, weights, chosen, True, **more)
    assert oracle.relative_error(fixed, expected) < 2 * ELEMENTWISE[dtype]
    for start, end in ((0, 1), (num_tokens // 2, num_tokens)):
        alone = op(x[start:end], w13, w2, weights[start:end], chosen[start:end], True, **more)
        assert torch.equal(alone, fixed[start:end])


def pairs_add_rms_norm(
    op: Op, sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """A token's outputs, but for those of no expert, are added to its row, and that is normed; with
    another expert's beside them, and with sums in their place, to the bit as one by one."""
    num_tokens, top_k, hidden = sizes
    parts = torch.randn(num_tokens * top_k, hidden, device=device).to(dtype)
    experts = torch.randint(-1, 3, (num_tokens, top_k), dtype=torch.int32, device=device)
    parts[experts.flatten() < 0] = torch.nan
    residual = torch.randn(num_tokens, 2 * hidden, device=device).to(dtype)[:, :hidden]
    weight = torch.randn(hidden, device=device).to(dtype)
    known = parts.view(num_tokens, top_k, hidden).double().nan_to_num(0.0).sum(1)
    carried = (known.float().to(dtype).double() + residual.double()).to(dtype)
    before, beside = residual.clone(), torch.randn(num_tokens, hidden, device=device).to(dtype)
    normed = op(parts, experts, residual, weight, 1e-6)
    assert oracle.relative_error(residual, carried) < ELEMENTWISE[dtype]
    expected = oracle.rms_norm(residual, weight, 1e-6)
    assert oracle.relative_error(normed, expected) < ELEMENTWISE[dtype]
    sums = ops.sum_pairs(parts, experts)
    for given, chosen in ((parts, experts), (sums, None)):
        total = before.clone()
        normed = op(given, chosen, total, weight, 1e-6, beside)
        assert torch.equal(total, (sums + beside) + before)
        expected = oracle.rms_norm(total, weight, 1e-6)
        assert oracle.relative_error(normed, expected) < ELEMENTWISE[dtype]
    total = before.clone()
    gate = (0.2 * torch.randn(num_tokens + 1, hidden, device=device)).to(dtype).split(num_tokens)
    normed = op(parts, experts, total, weight, 1e-6, beside.clone(), gate)
    odds = 1 + torch.exp(-(gate[0].double() @ gate[1].double().T))
    gated = (sums + (beside.double() / odds).to(dtype)) + before
    assert oracle.relative_error(total, gated) < ELEMENTWISE[dtype]
    expected = oracle.rms_norm(total, weight, 1e-6)
    assert oracle.relative_error(normed, expected) < ELEMENTWISE[dtype]


def add_normed(
    op: Op, rows: int, width: int, dtype: torch.dtype, *, readers: int, top_k: int | None = None,
    device: str = "cpu",
) -> None:  # fmt: skip
    """The norm of rows, or of those of a dense block and of experts (`top_k`; 0: of their sums), is
    added to the stream, which readers norm. Their weights are wider than the rows."""
    x = torch.randn(rows, 2 * width, device=device).to(dtype)[:, :width]
    residual = torch.randn(rows, width, device=device).to(dtype)
    by, *others = (Norm(torch.randn(width, device=device), eps) for eps in (1e-6, 0.1, 0.2, 0.3))
    scale = None if readers == 1 else torch.full((1,), 0.8, dtype=dtype, device=device)
    paired, given = None, x
    if top_k is not None:
        parts = torch.randn(rows * max(top_k, 1), width, device=device).to(dtype)
        experts = None
        if top_k:
            experts = torch.randint(-1, 3, (rows, top_k), dtype=torch.int32, device=device)
        paired = PairedExperts(parts, experts, *others[:2])
        sums = ops.sum_pairs(parts, experts)
        both = ((x, others[0]), (sums, others[1]))
        given = sum(oracle.rms_norm(one, norm.weight, norm.eps).to(dtype) for one, norm in both)
    total = residual + oracle.rms_norm(given, by.weight, by.eps).to(dtype)
    total = total if scale is None else total * scale
    found = op(x, residual, by, tuple(others[:readers]), scale, paired)
    assert oracle.relative_error(residual, total) < ELEMENTWISE[dtype]
    assert len(found) == readers
    for one, norm in zip(found, others, strict=False):
        expected = oracle.rms_norm(residual, norm.weight, norm.eps)
        assert oracle.relative_error(one, expected) < ELEMENTWISE[dtype]


def latent_rope_and_cache(
    op: Op, sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Checks the write into the latent cache. `sizes` is (H, L, R); token 2 writes nothing, and
    queries are a part of wider heads."""
    num_heads, latent, rope = sizes
    num_tokens, block_size = 6, 4
    heads = torch.randn(num_tokens, num_heads, 5 + rope, device=device).to(dtype)
    kv = torch.randn(num_tokens, latent + rope, device=device).to(dtype)
    weight = torch.randn(latent, device=device).to(dtype)
    positions = torch.randint(0, 64, (num_tokens,), device=device)
    slots = torch.randperm(5 * block_size, device=device)[:num_tokens]
    slots[2] = -1
    cache = torch.full((5, block_size, latent + rope), math.nan, dtype=dtype, device=device)
    angles = oracle.rope_angles(64, rope).to(device)[positions]
    expected_q = oracle.rotate(heads[:, :, 5:], angles)
    expected = torch.cat(
        (
            oracle.rms_norm(kv[:, :latent], weight, 1e-6),
            oracle.rotate(kv[:, None, latent:], angles)[:, 0],
        ),
        dim=-1,
    )
    untouched = heads[:, :, :5].clone()
    table = oracle.cos_sin_cache(oracle.rope_angles(64, rope)).to(device)
    op(heads[:, :, 5:], kv, weight, positions, table, cache, slots, 1e-6)
    assert torch.equal(heads[:, :, :5], untouched)
    assert oracle.relative_error(heads[:, :, 5:], expected_q) < ELEMENTWISE[dtype]
    flat = cache.view(-1, latent + rope)
    kept = slots >= 0
    assert oracle.relative_error(flat[slots[kept]], expected[kept]) < ELEMENTWISE[dtype]
    assert int(flat.isnan().any(-1).sum()) == len(flat) - int(kept.sum())


def latent_attention(
    op: Op,
    lengths: tuple[list[int], list[int]],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    fixed_order: bool = False,
    device: str = "cpu",
) -> None:
    """Checks against attention of one KV head, whose values are the first L of its keys. `lengths`
    are those of contexts and queries, `sizes` is (H, L, R)."""
    num_heads, latent, rope = sizes
    batch = oracle.paged_batch(
        *lengths, num_kv_heads=1, group=num_heads, head_dim=latent + rope, block_size=16,
        dtype=dtype, device=device,
    )  # fmt: skip
    cache = batch.kv_cache[:, 0, 0]
    batch.values = [keys[:, :, :latent] for keys in batch.keys]
    q = batch.q
    batch.metadata = replace(batch.metadata, fixed_order=fixed_order)
    out = op(q[:, :, :latent], q[:, :, latent:], cache, batch.metadata, batch.scale)
    assert out.shape == (len(q), num_heads, latent) and out.dtype == dtype
    assert oracle.relative_error(out, batch.expected(latent)) < ATTENTION[dtype]


def latent_decode(
    op: Op,
    seq_lens: list[int],
    query_len: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    device: str = "cpu",
    **options: object,
) -> None:
    """Checks decodes of `query_len` tokens each, with `options` for the kernel. What lies behind
    them belongs to others and stays as it is."""
    num_heads, latent, rope = sizes
    batch = oracle.paged_batch(
        seq_lens, [query_len] * len(seq_lens), num_kv_heads=1, group=num_heads,
        head_dim=latent + rope, block_size=block_size, dtype=dtype, device=device,
    )  # fmt: skip
    batch.values = [keys[:, :, :latent] for keys in batch.keys]
    metadata = replace(batch.metadata, num_decodes=len(seq_lens), decode_query_len=query_len)
    q, num_rows = batch.q, query_len * len(seq_lens)
    out = torch.full((num_rows + 2, num_heads, latent), math.nan, dtype=dtype, device=device)
    cache = batch.kv_cache[:, 0, 0]
    op(q[:, :, :latent], q[:, :, latent:], cache, metadata, batch.scale, out, **options)
    assert out[num_rows:].isnan().all()
    assert oracle.relative_error(out[:num_rows], batch.expected(latent)) < ATTENTION[dtype]


def gather_latents(
    op: Op, sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Checks ranges of several requests, one of them empty, and rows of nobody. `sizes` is
    (H, L, R); the keys' place is a part of wider rows, the rest of which stays as it is."""
    num_heads, latent, rope = sizes
    seq_lens, ranges = [70, 5, 33, 20], [(16, 60), (0, 5), (7, 7), (19, 20)]
    batch = oracle.paged_batch(
        seq_lens, [1] * 4, num_kv_heads=1, group=1, head_dim=latent + rope, block_size=16,
        dtype=dtype, device=device,
    )  # fmt: skip
    first = torch.tensor([start for start, _ in ranges], dtype=torch.int32, device=device)
    bounds = oracle.cumulative([end - start for start, end in ranges]).to(device)
    total = int(bounds[-1])
    wide = torch.full((total + 3, num_heads, 5 + rope), math.nan, dtype=dtype, device=device)
    tables = batch.metadata.block_tables
    latents = op(batch.kv_cache[:, 0, 0], tables, first, bounds, wide[:, :, 5:])
    rows = [keys[0, start:end] for keys, (start, end) in zip(batch.keys, ranges, strict=True)]
    expected = torch.cat((*rows, torch.zeros_like(rows[0][:3])))
    assert torch.equal(latents, expected[:, :latent])
    assert torch.equal(wide[:, :, 5:], expected[:, None, latent:].expand(-1, num_heads, -1))
    assert wide[:, :, :5].isnan().all()


def gather_context(
    op: Op, head_dim: int, dtype: torch.dtype, device: str = "cpu", value_dim: int | None = None
) -> None:
    """Checks ranges of several requests, one of them empty, in a cache with room behind its
    blocks, and the same in FP8. `value_dim`: where values are narrower than keys."""
    seq_lens, ranges = [70, 5, 33, 20], [(16, 60), (0, 5), (7, 7), (19, 20)]
    batch = oracle.paged_batch(
        seq_lens, [1] * 4, num_kv_heads=3, group=1, head_dim=head_dim, block_size=16,
        dtype=dtype, device=device, page_padding=64, value_dim=value_dim,
    )  # fmt: skip
    first = torch.tensor([start for start, _ in ranges], dtype=torch.int32, device=device)
    bounds = oracle.cumulative([end - start for start, end in ranges]).to(device)
    given = batch.metadata.block_tables, first, bounds, int(bounds[-1]), dtype
    found = op(batch.kv_cache, *given)
    for copied, stored in zip(found, (batch.keys, batch.values), strict=True):
        rows = [
            part[:, start:end].transpose(0, 1)
            for part, (start, end) in zip(stored, ranges, strict=True)
        ]
        assert copied.dtype == dtype and torch.equal(copied, torch.cat(rows).to(dtype))
    factors = torch.tensor([0.5, 1.0, 2.0], device=device)
    scales = KVScales(factors, factors.flip(0))
    pages = apart(batch.kv_cache)
    quantised = KVPages(pages.k.to(E4M3), pages.v.to(E4M3))
    rounded = KVPages(quantised.k.to(dtype), quantised.v.to(dtype))
    copies, plain = op(quantised, *given, scales), op(rounded, *given)
    for copied, numbers, scale in zip(copies, plain, (scales.k, scales.v), strict=True):
        assert torch.equal(copied, numbers * scale[:, None].to(dtype))


def ragged_attention(
    op: Op,
    lengths: tuple[list[int], list[int]],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    causal: bool,
    device: str = "cpu",
) -> None:
    """Checks queries and keys of `lengths`; `sizes` is (H, D, V). All three are parts of wider
    rows."""
    num_heads, key, value = sizes
    query_lens, key_lens = lengths
    q = torch.randn(sum(query_lens), num_heads, key + 8, device=device).to(dtype)[:, :, 8:]
    kv = torch.randn(sum(key_lens), num_heads, value + key, device=device).to(dtype)
    kv = torch.cat((kv, torch.full_like(kv[:1], math.nan)))
    k, v = kv[:, :, value:], kv[:, :, :value]
    batch = RaggedBatch(
        oracle.cumulative(query_lens).to(device),
        oracle.cumulative(key_lens).to(device),
        max(query_lens),
        max(key_lens),
        causal,
    )
    out, log_sums = op(q, k, v, batch, key**-0.5)
    assert out.dtype == dtype and log_sums.dtype == torch.float32
    expected, expected_sums = oracle.ragged_attention(q, k, v, lengths, key**-0.5, causal=causal)
    assert oracle.relative_error(out, expected) < ATTENTION[dtype]
    torch.testing.assert_close(
        log_sums.double(), expected_sums, rtol=ATTENTION[dtype], atol=ATTENTION[dtype]
    )


def merge_attention(
    op: Op, sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Checks the join of two parts; `sizes` is (T, H, V). One part counts for nothing once, and of
    another row there is nothing in both."""
    num_tokens, num_heads, _ = sizes
    parts = [torch.randn(sizes, device=device).to(dtype) for _ in range(2)]
    for part in parts:
        part[1, 0] = 0.0
    # As in a step: a part of the rows of more queries.
    sums = [torch.randn(num_heads, num_tokens + 3, device=device)[:, 3:] * 5 for _ in range(2)]
    sums[1][0, 0] = sums[0][0, 1] = sums[1][0, 1] = -math.inf
    shares = torch.stack([part.double().t()[..., None] for part in sums]).exp()
    wide = torch.stack([part.double() for part in parts])
    expected = ((wide * shares).sum(0) / shares.sum(0)).nan_to_num(0.0)
    expected_sums = torch.stack([part.double() for part in sums]).logsumexp(0)
    op(parts[0], sums[0], parts[1], sums[1])
    assert oracle.relative_error(parts[0], expected) < ELEMENTWISE[dtype]
    torch.testing.assert_close(sums[0].double(), expected_sums, rtol=1e-5, atol=1e-5)


def add_sinks(op: Op, sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """Checks attention [T, H, V] against a softmax with one more score. Sums are part of a larger
    tensor; a sink is far above, and one far below, all scores."""
    num_tokens, num_heads, _ = sizes
    attended = torch.randn(sizes, device=device).to(dtype)
    log_sums = torch.randn(num_heads, num_tokens + 3, device=device)[:, 3:] * 5
    sinks = torch.randn(num_heads, device=device) * 3
    sinks[0], sinks[-1] = 200.0, -200.0
    sums = log_sums.double().exp().t()
    expected = attended.double() * (sums / (sums + sinks.double().exp()))[..., None]
    op(attended, log_sums, sinks)
    assert oracle.relative_error(attended, expected) < ELEMENTWISE[dtype]


def lookup_ngrams(
    op: Op, length: int, num_tokens: int, lengths: tuple[int, int], device: str = "cpu"
) -> None:
    """Rows of up to `length` tokens, of `num_tokens` kinds, against a search from the end."""
    torch.manual_seed(length)
    min_len, max_len = lengths
    totals = [1, 2, length, *torch.randint(1, length + 1, (5,)).tolist()]
    rows = RowTables(
        token_ids=torch.randint(0, num_tokens, (len(totals), length)).int().to(device),
        num_computed=torch.zeros(len(totals), dtype=torch.int32, device=device),
        total_len=torch.tensor(totals, dtype=torch.int32, device=device),
        max_len=torch.full((len(totals),), length, dtype=torch.int32, device=device),
        block_table=torch.zeros((len(totals), 1), dtype=torch.int32, device=device),
        block_size=length,
        max_drafts=5,
    )
    mapping = [*torch.randperm(len(totals)).tolist(), -1]
    idx_mapping = torch.tensor(mapping, dtype=torch.int32, device=device)
    found = op(idx_mapping, rows, min_len, max_len).tolist()
    assert found[-1] == [-1] * 5
    num_found = 0
    for row, drafts in zip(mapping[:-1], found, strict=False):
        known = rows.token_ids[row, : totals[row]].tolist()
        place = _latest_longest(known, min_len, max_len)
        if place is None:
            assert drafts == [-1] * 5
            continue
        num_found += 1
        for draft in drafts:
            assert draft == known[place]
            known.append(known[place])
            place += 1
    assert num_found > 0


def _latest_longest(known: list[int], min_len: int, max_len: int) -> int | None:
    """Returns the place behind the latest match of the longest of the last tokens."""
    for count in range(max_len, min_len - 1, -1):
        for place in range(len(known) - 1, count - 1, -1):
            if known[place - count : place] == known[-count:]:
                return place
    return None
