"""Rows against a dictionary of requests: enter, grow, advance, leave, in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.batch.block_table import BlockTables
from engine.batch.buffer_utils import Carrier
from engine.batch.decode_set import DecodeSet
from engine.batch.row_states import RowError, RowStates
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import NewRequestData
from tandem_kernels import ops

CPU = torch.device("cpu")
ROWS, MAX_LEN, BLOCK_SIZE = 4, 24, 4
MAX_BLOCKS = MAX_LEN // BLOCK_SIZE


def new_request(row: int, tokens: list[int], computed: int = 0, epoch: int = 0) -> NewRequestData:
    return NewRequestData(
        row=row,
        epoch=epoch,
        prompt_len=len(tokens),
        prefill_token_ids=np.array(tokens, "<i4").tobytes(),
        num_computed_tokens=computed,
        block_ids=[],
        max_len=MAX_LEN,
        sampling=SamplingParams(),
    )


class RowMachine(RuleBasedStateMachine):
    """`live[row]` is [tokens, computed, blocks] of a plain model."""

    @initialize()
    def start(self) -> None:
        self.states = RowStates(ROWS, MAX_LEN, CPU)
        self.block_tables = BlockTables(ROWS, MAX_LEN, BLOCK_SIZE, CPU)
        self.decode_set = DecodeSet(ROWS)
        self.decoding: set[int] = set()
        self.live: dict[int, tuple[list[int], int, list[int]]] = {}
        self.epochs = dict.fromkeys(range(ROWS), 0)

    @rule(
        row=st.integers(0, ROWS - 1),
        tokens=st.lists(st.integers(0, 99), min_size=1, max_size=MAX_LEN),
        computed=st.integers(0, MAX_LEN),
        blocks=st.lists(st.integers(0, 50), max_size=MAX_BLOCKS),
        replace=st.booleans(),
    )
    def enter(
        self, row: int, tokens: list[int], computed: int, blocks: list[int], replace: bool
    ) -> None:
        """Enters a request. `replace`: the row's owner leaves and the row is given away within one
        message.
        """
        if row in self.live:
            if not replace:
                with pytest.raises(RowError, match="in use"):
                    self.states.add_request(new_request(row, tokens))
                return
            self.leave(row)
        computed = min(computed, len(tokens) - 1)
        self.epochs[row] += 1
        self.states.add_request(new_request(row, tokens, computed, self.epochs[row]))
        self.block_tables.add_request(row, blocks)
        self.live[row] = (list(tokens), computed, list(blocks))

    @rule(row=st.integers(0, ROWS - 1))
    def leave(self, row: int) -> None:
        if row not in self.live:
            with pytest.raises(RowError, match="is free"):
                self.states.remove_request(row)
            return
        self.states.remove_request(row)
        self.block_tables.remove_request(row)
        self.decode_set.remove_request(row)
        self.decoding.discard(row)
        del self.live[row]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), blocks=st.lists(st.integers(0, 50), min_size=1, max_size=2))
    def append_blocks(self, data: st.DataObject, blocks: list[int]) -> None:
        row = data.draw(st.sampled_from(sorted(self.live)))
        if len(self.live[row][2]) + len(blocks) <= MAX_BLOCKS:
            self.block_tables.append(row, blocks)
            self.live[row][2].extend(blocks)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), sampled=st.integers(0, 99))
    def run_step(self, data: st.DataObject, sampled: int) -> None:
        """Lets one row compute all that it has left and sample."""
        row = data.draw(st.sampled_from(sorted(self.live)))
        tokens, computed, blocks = self.live[row]
        if len(tokens) == MAX_LEN:
            return
        self.apply()
        query_len = len(tokens) - computed
        ops.post_update(
            torch.tensor([row], dtype=torch.int32),
            torch.tensor([0, query_len], dtype=torch.int32),
            torch.tensor([[sampled]]),
            self.states.row_tables(self.block_tables),
        )
        self.states.advance(np.array([row], np.int32), np.array([query_len], np.int32))
        is_done = len(tokens) + 1 == MAX_LEN
        self.live[row] = ([*tokens, sampled], len(tokens) + is_done, blocks)
        self.decode_set.add_request(row)
        self.decoding.add(row)

    @rule()
    def apply(self) -> None:
        Carrier([*self.states.carried, *self.block_tables.carried], CPU).carry_over()

    @invariant()
    def rows_equal_the_model(self) -> None:
        assert np.flatnonzero(self.states.is_live_np).tolist() == sorted(self.live)
        assert self.decode_set.rows.tolist() == sorted(self.decoding)
        self.apply()
        for row, (tokens, computed, blocks) in self.live.items():
            assert self.states.token_ids.tensor[row, : len(tokens)].tolist() == tokens
            assert int(self.states.total_len.tensor[row]) == len(tokens)
            assert int(self.states.num_computed.tensor[row]) == computed
            assert int(self.states.num_computed_np[row]) == min(computed, MAX_LEN - 1)
            assert int(self.states.max_len.tensor[row]) == MAX_LEN
            assert int(self.states.epoch_np[row]) == self.epochs[row]
            assert self.block_tables.tensor[row, : len(blocks)].tolist() == blocks
            assert int(self.block_tables.num_blocks_np[row]) == len(blocks)

    def teardown(self) -> None:
        for row in list(getattr(self, "live", {})):
            self.leave(row)
        if hasattr(self, "states"):
            assert not self.states.is_live_np.any()
            assert not self.block_tables.num_blocks_np.any()
            assert len(self.decode_set.rows) == 0


RowMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestRows = RowMachine.TestCase


@pytest.mark.parametrize("row", [-1, ROWS])
def test_rows_that_do_not_exist_are_refused(row: int) -> None:
    states = RowStates(ROWS, MAX_LEN, CPU)
    with pytest.raises(RowError, match=f"row {row} does not exist; there are {ROWS}"):
        states.add_request(new_request(row, [1]))


def test_more_blocks_than_a_sequence_can_have_are_refused() -> None:
    block_tables = BlockTables(ROWS, MAX_LEN, BLOCK_SIZE, CPU)
    block_tables.add_request(0, list(range(MAX_BLOCKS)))
    with pytest.raises(IndexError):
        block_tables.append(0, [99])
