"""Lists what each request of a step takes into its state, and reads from it, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata


@dataclass(frozen=True, slots=True)
class StateRun:
    """The tokens of one request that a step goes through: pending ones, then its own.

    Attributes:
        block: Holds its state.
        goes_on: It begins with that state, else with zeros.
        start, stop: Its tokens among those of the step.
        num_pending: Tokens in front of them.
        num_taken_in: How many of all stay in the state.
        line: Of the first of all among the rows of `causal_conv`.
        row: Of a decode in an engine that drafts: where inputs are kept; None of others.
        first: The place of the first of all in the sequence.
    """

    block: int
    goes_on: bool
    start: int
    stop: int
    num_pending: int
    num_taken_in: int
    line: int
    row: int | None
    first: int

    @property
    def count(self) -> int:
        """Returns how many tokens there are, pending ones and its own."""
        return self.num_pending + self.stop - self.start


def state_runs(metadata: StateMetadata) -> list[StateRun]:
    """Returns the runs of all requests that are no padding, in their order."""
    bounds, pending = metadata.query_start_loc.tolist(), metadata.pending
    columns = metadata.seq_lens.tolist(), metadata.blocks.tolist()
    runs = []
    for r, (start, stop, seq_len, block) in enumerate(
        zip(bounds[:-1], bounds[1:], *columns, strict=True)
    ):
        if seq_len == 0 or stop == start:
            continue
        first = seq_len - (stop - start)
        if pending is None or r >= metadata.num_decodes:
            line = start + metadata.num_pending_rows
            runs.append(StateRun(block, first > 0, start, stop, 0, stop - start, line, None, first))
            continue
        row = int(pending.rows[r])
        taken = int(pending.num_taken[row])
        count = min(max(first - taken, 0), pending.most)
        line = r * (pending.most + stop - start) + pending.most - count
        runs.append(StateRun(block, taken > 0, start, stop, count, count, line, row, first - count))
    return runs


def gates_of(run: StateRun, gates: Tensor, kept: Tensor | None) -> Tensor:
    """Returns the gates of a run's tokens, and keeps those of a decode with drafts."""
    own = gates[run.start : run.stop]
    if run.row is None:
        return own
    assert kept is not None
    places = torch.arange(run.first, run.first + run.count) % kept.shape[1]
    pending = kept[run.row, places[: run.num_pending]]
    kept[run.row, places[run.num_pending :]] = own
    return torch.cat((pending, own))
