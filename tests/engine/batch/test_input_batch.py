"""A batch gathered from rows is what a plain loop over its requests gives."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.block_table import BlockTables
from engine.batch.buffer_utils import Carrier
from engine.batch.input_batch import BatchOrder, InputBatch, InputBuffers, order_batch
from engine.batch.row_states import RowError, RowStates
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import NewRequestData
from engine.layers.attention.backend import AttentionBackend, PrefillChunk
from engine.layers.attention.paged import PagedBackend
from tandem_kernels.batch.batch_tables import RowTables

CPU = torch.device("cpu")
ROWS, MAX_LEN, BLOCK_SIZE, MAX_TOKENS = 6, 40, 8, 64


@dataclass
class Entry:
    """One request of a step: `chunk` 0 means that it decodes."""

    row: int
    tokens: list[int]
    computed: int
    blocks: list[int]
    chunk: int


class Rows:
    def __init__(self, entries: list[Entry]) -> None:
        self.states = RowStates(ROWS, MAX_LEN, CPU)
        self.block_tables = BlockTables(ROWS, MAX_LEN, BLOCK_SIZE, CPU)
        self.buffers = InputBuffers(ROWS, MAX_TOKENS, [MAX_LEN // BLOCK_SIZE], CPU)
        for entry in entries:
            self.states.add_request(
                NewRequestData(
                    row=entry.row,
                    epoch=1,
                    prompt_len=len(entry.tokens),
                    prefill_token_ids=np.array(entry.tokens, "<i4").tobytes(),
                    num_computed_tokens=entry.computed,
                    block_ids=entry.blocks,
                    max_len=MAX_LEN,
                    sampling=SamplingParams(),
                )
            )
            self.block_tables.add_request(entry.row, entry.blocks)
        Carrier([*self.states.carried, *self.block_tables.carried], CPU).carry_over()

    @property
    def tables(self) -> RowTables:
        return self.states.row_tables(self.block_tables)

    def prepare(self, order: BatchOrder) -> InputBatch:
        return self.buffers.prepare(order, [self.tables])


@st.composite
def steps(draw: st.DrawFn) -> list[Entry]:
    entries = []
    for row in draw(st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True)):
        length = draw(st.integers(1, MAX_LEN))
        tokens = draw(st.lists(st.integers(0, 500), min_size=length, max_size=length))
        decodes = draw(st.booleans())
        computed = length - 1 if decodes else draw(st.integers(0, length - 1))
        most = min(length - computed, MAX_TOKENS // ROWS)
        chunk = 0 if decodes else draw(st.integers(1, most))
        blocks = [100 * row + i for i in range(-(-length // BLOCK_SIZE))]
        entries.append(Entry(row, tokens, computed, blocks, chunk))
    return entries


def order_of(
    rows: Rows, entries: list[Entry], attention: AttentionBackend | None = None
) -> BatchOrder:
    decode_rows = np.array(sorted(e.row for e in entries if e.chunk == 0), np.int32)
    chunks = [(e.row, e.chunk) for e in entries if e.chunk]
    return order_batch(decode_rows, chunks, rows.states, attention or PagedBackend())


class LongestFirst(PagedBackend):
    def order(self, chunks: list[PrefillChunk]) -> list[PrefillChunk]:
        return sorted(chunks, key=lambda chunk: (-chunk.num_tokens, -chunk.num_computed))


@given(entries=steps())
@settings(deadline=None)
def test_the_backend_orders_chunks_within_their_group(entries: list[Entry]) -> None:
    rows = Rows(entries)
    plain, order = order_of(rows, entries), order_of(rows, entries, LongestFirst())
    assert (order.num_decodes, order.num_sampled) == (plain.num_decodes, plain.num_sampled)
    bounds = (order.num_decodes, order.num_sampled, len(order.rows))
    assert order.rows[: bounds[0]].tolist() == plain.rows[: bounds[0]].tolist()
    for start, end in pairwise(bounds):
        kept, found = (
            [(int(o.query_lens[i]), int(o.seq_lens[i]), int(o.rows[i])) for i in range(start, end)]
            for o in (plain, order)
        )
        assert sorted(kept) == sorted(found)
        assert found == sorted(found, key=lambda item: (-item[0], item[0] - item[1]))


@given(entries=steps())
@settings(deadline=None)
def test_order_groups_requests(entries: list[Entry]) -> None:
    order = order_of(Rows(entries), entries)
    by_row = {e.row: e for e in entries}
    assert sorted(order.rows.tolist()) == sorted(by_row)
    for i, (row, length) in enumerate(zip(order.rows, order.query_lens, strict=True)):
        entry = by_row[int(row)]
        assert length == max(entry.chunk, 1)
        completes = entry.chunk == 0 or entry.computed + entry.chunk == len(entry.tokens)
        assert (i < order.num_sampled) == completes
        assert (i < order.num_decodes) == (completes and length == 1)


@given(entries=steps())
@settings(deadline=None)
def test_inputs_are_gathered_from_rows(entries: list[Entry]) -> None:
    rows = Rows(entries)
    by_row = {e.row: e for e in entries}
    batch = rows.prepare(order_of(rows, entries))
    input_ids, positions, slots, last_tokens = [], [], [], []
    for i, row in enumerate(batch.order.rows.tolist()):
        entry = by_row[row]
        length = max(entry.chunk, 1)
        context = entry.computed + length
        for position in range(entry.computed, context):
            input_ids.append(entry.tokens[position])
            positions.append(position)
            block = entry.blocks[position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        last_tokens.append(len(input_ids) - 1)
        assert int(batch.seq_lens[i]) == int(batch.order.seq_lens[i]) == context
        assert batch.block_tables[i, : len(entry.blocks)].tolist() == entry.blocks
    assert batch.input_ids.tolist() == input_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.logits_indices.tolist() == last_tokens[: batch.order.num_sampled]
    assert batch.num_tokens == len(input_ids)
    metadata = PagedBackend().metadata(batch)
    lengths = [max(by_row[row].chunk, 1) for row in batch.order.rows.tolist()]
    assert metadata.query_start_loc.diff().tolist() == lengths
    assert metadata.max_query_len == max(lengths)
    assert metadata.max_seq_len == int(batch.seq_lens.max())


def test_buffers_keep_their_addresses_from_step_to_step() -> None:
    entries = [Entry(0, [1, 2, 3], 2, [5], 0), Entry(2, list(range(20)), 0, [7, 8, 9], 9)]
    rows = Rows(entries)
    first = rows.prepare(order_of(rows, entries))
    second = rows.prepare(order_of(rows, entries[:1]))
    for name in ("idx_mapping", "query_start_loc", "input_ids", "positions", "slot_mapping"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr(), name
    assert rows.buffers._inputs.slot_mapping[second.num_tokens :].tolist() == [-1] * (
        MAX_TOKENS - second.num_tokens
    )


def test_a_row_past_its_end_writes_no_kv() -> None:
    """A step that was under way when the request ended may run on; it must not touch blocks."""
    entry = Entry(0, [1] * MAX_LEN, MAX_LEN - 1, [1, 2, 3, 4, 5], 0)
    rows = Rows([entry])
    rows.states.num_computed.tensor[0] = MAX_LEN
    rows.states.num_computed_np[0] = MAX_LEN
    batch = rows.prepare(order_of(rows, [entry]))
    assert batch.slot_mapping.tolist() == [-1]
    assert batch.positions.tolist() == [MAX_LEN - 1]


def test_a_step_beyond_the_budget_is_refused() -> None:
    entries = [Entry(row, [0] * MAX_LEN, 0, list(range(5)), MAX_LEN) for row in range(2)]
    rows = Rows(entries)
    with pytest.raises(ValueError, match="80 tokens is larger than max_num_batched_tokens"):
        rows.prepare(order_of(rows, entries))


def test_a_chunk_beyond_the_prefill_is_refused() -> None:
    entries = [Entry(0, [1, 2, 3], 1, [0], 3)]
    with pytest.raises(RowError, match="has 2 tokens to compute, not 3"):
        order_of(Rows(entries), entries)
