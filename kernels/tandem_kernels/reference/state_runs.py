"""Lists what each request of a step takes into its state, and reads from it, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
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


class Lockstep:
    """Goes through the tokens of all runs at once: the first of each, then the second of each, and
    so on. Runs are sorted by length, so that those that still go on are the leading ones.

    Attributes:
        lines: [T], of all tokens in that order, among the rows of `causal_conv`.
        sizes: How many tokens, of as many runs, each step has.
    """

    def __init__(self, runs: Sequence[StateRun], states: Tensor) -> None:
        self._runs = sorted(runs, key=lambda run: -run.count)
        counts = [run.count for run in self._runs]
        self.sizes = [sum(count > i for count in counts) for i in range(counts[0])]
        self._places = [(run, i) for i, n in enumerate(self.sizes) for run in self._runs[:n]]
        self.lines = torch.tensor([run.line + i for run, i in self._places])
        self._blocks = torch.tensor([run.block for run in self._runs])
        goes_on = torch.tensor([run.goes_on for run in self._runs])
        self._states = states
        found = states[self._blocks]
        self._now = torch.where(goes_on.view(-1, *[1] * (found.dim() - 1)), found, 0.0)
        self._stays = self._now.clone()
        self._num_gone = 0

    def gates(self, gates: Tensor, kept: Tensor | None) -> Tensor:
        """Returns the gates of all tokens, see `gates_of`."""
        parts = [gates_of(run, gates, kept) for run in self._runs]
        first, total = dict[int, int](), 0
        for run in self._runs:
            first[id(run)] = total
            total += run.count
        return torch.cat(parts)[[first[id(run)] + i for run, i in self._places]]

    def states(self) -> Tensor:
        """Returns those of the runs that go on, before the step."""
        return self._now[: self.sizes[self._num_gone]]

    def go(self, states: Tensor) -> None:
        """Ends a step, with the states behind it."""
        self._now = states
        self._num_gone += 1
        stay = [r for r in range(len(states)) if self._runs[r].num_taken_in == self._num_gone]
        if stay:
            self._stays[stay] = states[stay]

    def end(self, read: Sequence[Tensor], out: Tensor) -> None:
        """Keeps the states, and writes what was read in each step, of tokens that are not
        pending."""
        self._states[self._blocks] = self._stays
        own = [
            (line, run.start + i - run.num_pending)
            for line, (run, i) in enumerate(self._places)
            if i >= run.num_pending
        ]
        lines, rows = map(list, zip(*own, strict=True))
        out[rows] = torch.cat(list(read))[lines].to(out.dtype)


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
