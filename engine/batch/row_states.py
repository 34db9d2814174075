"""One permanent row for each live request: its tokens and how far they are computed.

Life of a row:
    1. `add_request` stages the known tokens and counts; the row is live.
    2. what `carried` hold of it is carried to the device, once for all requests of a step.
    3. Each step computes `n` tokens of the row: `advance` notes it on the host, and on the device
       `ops.post_update` appends what was sampled and moves `num_computed` by what stays of the `n`.
    4. `remove_request`: it finished, was aborted, or is preempted. Coming back is 1 again, with
       the tokens generated so far as part of its prefill.

    token_ids[row]   0 ............. prompt_len ........ prefill_len ......... total_len
                     |    prompt     | output known when | sampled in this row |
                     |               | the row was taken |                     |
                     0 ............................. num_computed ...
                     |        KV is in the cache     | still to compute

Drafts of the next tokens, if any, lie behind `total_len`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.block_table import BlockTables
from engine.batch.buffer_utils import CarriedTensor, HostBackedTensor, StagedWriteTensor
from engine.config import EngineConfig
from engine.contracts.scheduler_output import NewRequestData
from tandem_kernels.batch.batch_tables import RowTables


class RowError(RuntimeError):
    """A step message names a row that cannot be meant: the worker and the scheduler disagree."""


class RowStates:
    """All arrays are indexed by row. Tensors named without a suffix live on the device."""

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device,
        *,
        has_drafts: bool = False,
        has_states: bool = False,
    ) -> None:
        rows = max_num_reqs
        self.has_drafts = has_drafts
        """Rows may compute drafts, if not in every step."""
        self.max_num_reqs = max_num_reqs
        # Owned by the device: post_update appends tokens and advances counts.
        self.token_ids = StagedWriteTensor((rows, max_model_len), np.int32, device)
        self.num_computed = StagedWriteTensor((rows,), np.int32, device)
        self.total_len = StagedWriteTensor((rows,), np.int32, device)
        self.num_taken: StagedWriteTensor | None = None
        """Counts tokens in states, which take drafts in later: see `state_metadata`."""
        if has_drafts and has_states:
            self.num_taken = StagedWriteTensor((rows,), np.int32, device)
        # Owned by the host: fixed while the row is live.
        self.max_len = HostBackedTensor(rows, np.int32, device)
        # Host only.
        self.prefill_len_np = np.zeros(rows, np.int32)
        self.epoch_np = np.zeros(rows, np.int64)
        self.is_live_np = np.zeros(rows, np.bool_)
        self.num_computed_np = np.zeros(rows, np.int32)
        """Once all given steps have run. Exact where no row ever has drafts; with them an upper
        bound of rows that decode. Sizes things, decides nothing on a token."""

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> RowStates:
        """Returns the rows of an engine."""
        return cls(
            config.scheduler.max_num_seqs,
            config.model.max_model_len,
            device,
            has_drafts=config.decode_query_len > 1,
            has_states=any(group.is_state for group in config.kv_layout.groups),
        )

    def add_request(self, new: NewRequestData) -> None:
        """Raises `RowError` when the row is not free."""
        self._check(new.row, live=False)
        tokens = np.frombuffer(new.prefill_token_ids, "<i4")
        self.token_ids.stage_write(new.row, new.first_token, tokens)
        self.num_computed.stage_value(new.row, new.num_computed_tokens)
        if self.num_taken is not None:
            self.num_taken.stage_value(new.row, new.num_computed_tokens)
        self.total_len.stage_value(new.row, new.prefill_len)
        self.prefill_len_np[new.row] = new.prefill_len
        self.max_len.write(new.row, new.max_len)
        self.epoch_np[new.row] = new.epoch
        self.num_computed_np[new.row] = new.num_computed_tokens
        self.is_live_np[new.row] = True

    @property
    def carried(self) -> list[CarriedTensor]:
        """Returns the arrays that are carried over before a step."""
        of_states = [] if self.num_taken is None else [self.num_taken]
        return [self.token_ids, self.num_computed, self.total_len, self.max_len, *of_states]

    def remove_request(self, row: int) -> None:
        """Raises `RowError` when nothing has the row."""
        self._check(row, live=True)
        self.is_live_np[row] = False

    def check_live(self, row: int) -> None:
        """Raises `RowError` when nothing has the row."""
        self._check(row, live=True)

    def check_chunk(self, row: int, length: int) -> None:
        """Raises `RowError` when the row's prefill has not `length` tokens left."""
        self._check(row, live=True)
        left = self.num_uncomputed_prefill(row)
        if not 0 < length <= left:
            raise RowError(f"row {row} has {left} tokens to compute, not {length}")

    def num_uncomputed_prefill(self, row: int) -> int:
        """Returns the number of prefill tokens that no step has computed yet."""
        return int(self.prefill_len_np[row]) - int(self.num_computed_np[row])

    def advance(self, rows: npt.NDArray[np.int32], query_lens: npt.NDArray[np.int32]) -> None:
        """Records that a step computes `query_lens[i]` tokens of `rows[i]`."""
        self.num_computed_np[rows] += query_lens

    def limit(self, rows: npt.NDArray[np.int32], num_slots: npt.NDArray[np.int32]) -> None:
        """Blocks are given for what a row may have: `num_slots[i]` tokens of `rows[i]` at most."""
        self.num_computed_np[rows] = np.minimum(self.num_computed_np[rows], num_slots)

    def row_tables(self, block_tables: BlockTables) -> RowTables:
        """Returns the tables that batch kernels read and write."""
        return RowTables(
            token_ids=self.token_ids.tensor,
            num_computed=self.num_computed.tensor,
            total_len=self.total_len.tensor,
            max_len=self.max_len.tensor,
            block_table=block_tables.tensor,
            block_size=block_tables.block_size,
            max_drafts=block_tables.max_drafts,
            num_taken=None if self.num_taken is None else self.num_taken.tensor,
        )

    def _check(self, row: int, live: bool) -> None:
        if not 0 <= row < self.max_num_reqs:
            raise RowError(f"row {row} does not exist; there are {self.max_num_reqs}")
        if self.is_live_np[row] != live:
            state = "is in use" if self.is_live_np[row] else "is free"
            raise RowError(f"row {row} {state} (epoch {self.epoch_np[row]})")
