"""Step inputs, row updates, staged writes and block copies against one-at-a-time Python."""

from __future__ import annotations

import kernel_checks as check
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_oracle import cumulative

from tandem_kernels import ops
from tandem_kernels.batch.batch_tables import GroupTables

lengths_of_a_step = st.lists(st.integers(1, 9), min_size=1, max_size=check.NUM_ROWS - 1)
seeds = st.integers(0, 1000)


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_of_a_step, padding=st.integers(0, 1), seed=seeds)
def test_prepare_inputs(lengths: list[int], padding: int, seed: int) -> None:
    check.prepare_inputs(ops.prepare_inputs, lengths, padding, seed)


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_of_a_step, seed=seeds, width=st.integers(1, 4))
def test_post_update(lengths: list[int], seed: int, width: int) -> None:
    check.post_update(ops.post_update, lengths, seed, width)


@settings(max_examples=20, deadline=None)
@given(num_reqs=st.integers(1, check.NUM_ROWS), seed=seeds)
def test_write_drafts(num_reqs: int, seed: int) -> None:
    check.write_drafts(ops.write_drafts, num_reqs, seed)


@pytest.mark.parametrize(("length", "num_tokens"), [(40, 2), (300, 5), (2000, 9)])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (3, 3)])
def test_lookup_ngrams(length: int, num_tokens: int, lengths: tuple[int, int]) -> None:
    check.lookup_ngrams(ops.lookup_ngrams, length, num_tokens, lengths)


def test_a_sampled_token_is_the_next_step_input() -> None:
    rows, inputs = check.make_rows(3), check.make_inputs()
    rows.max_len.fill_(check.MAX_LEN)
    rows.total_len[2], rows.num_computed[2] = 7, 6
    mapping, bounds = torch.tensor([2], dtype=torch.int32), cumulative([1])
    groups = GroupTables.of((rows,), (inputs,))
    ops.prepare_inputs(mapping, bounds, groups)
    ops.post_update(mapping, bounds, torch.tensor([[4242]]), rows)
    ops.prepare_inputs(mapping, bounds, groups)
    assert (int(inputs.input_ids[0]), int(inputs.positions[0])) == (4242, 7)


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6), seed=seeds)
def test_write_pieces(pieces: list[tuple[int, int]], seed: int) -> None:
    check.write_pieces(ops.write_pieces, pieces, 24, seed)


@settings(max_examples=20, deadline=None)
@given(page_bytes=st.integers(1, 40), num_copies=st.integers(0, 5))
def test_copy_blocks(page_bytes: int, num_copies: int) -> None:
    check.copy_blocks(ops.copy_blocks, page_bytes, num_copies)
