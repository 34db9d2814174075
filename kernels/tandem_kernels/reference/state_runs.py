"""Lists what each request of a step takes into its state, and reads from it, in plain Python, once
for all layers of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata


@dataclass(frozen=True, slots=True)
class StateRun:
    """The tokens of one request that a step goes through: pending ones, then its own.

    Attributes:
        request: Its place in the step.
        goes_on: It begins with that state, else with zeros.
        start, stop: Its tokens among those of the step.
        num_pending: Tokens in front of them.
        num_taken_in: How many of all stay in the state.
        line: Of the first of all among the rows of `causal_conv`.
        row: Of a decode in an engine that drafts: where inputs are kept; None of others.
        first: The place of the first of all in the sequence.
    """

    request: int
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Holds what `StateMetadata` says, in numbers, but for the blocks: layers may have their own.

    Attributes:
        pending: Of each decode its row and how many tokens that has taken; None: nothing is kept.
        most: Pending tokens of a decode.
    """

    bounds: tuple[int, ...]
    seq_lens: tuple[int, ...]
    pending: tuple[tuple[int, int], ...] | None
    most: int

    @classmethod
    def of(cls, metadata: StateMetadata) -> _Batch:
        columns = metadata.query_start_loc, metadata.seq_lens
        bounds, seq_lens = (tuple(column.tolist()) for column in columns)
        if metadata.pending is None:
            return cls(bounds, seq_lens, None, 0)
        rows = metadata.pending.rows[: metadata.num_decodes].tolist()
        taken = metadata.pending.num_taken.tolist()
        pending = tuple((row, taken[row]) for row in rows)
        return cls(bounds, seq_lens, pending, metadata.pending.most)

    def runs(self) -> list[StateRun]:
        """Returns the runs of all requests that are no padding, in their order."""
        runs, decodes = [], self.pending or ()
        for r, (start, stop, seq_len) in enumerate(
            zip(self.bounds[:-1], self.bounds[1:], self.seq_lens, strict=True)
        ):
            if seq_len == 0 or stop == start:
                continue
            first = seq_len - (stop - start)
            if r >= len(decodes):
                line, own = start + len(decodes) * self.most, stop - start
                runs.append(StateRun(r, first > 0, start, stop, 0, own, line, None, first))
                continue
            row, taken = decodes[r]
            count = min(max(first - taken, 0), self.most)
            line, begin = r * (self.most + stop - start) + self.most - count, first - count
            runs.append(StateRun(r, taken > 0, start, stop, count, count, line, row, begin))
        return runs


class StateRuns:
    """Holds the runs of a step, the longest first, and where their tokens are: all layers of the
    step share it, and none changes it.

    Attributes:
        requests: [n], of the runs.
        goes_on: [n] bool.
        lines: [T], of all tokens of a run, then of the next, among the rows of `causal_conv`.
        sources: [T], of the same tokens among pending ones and, behind these, the step's own.
        order: [T]: the first token of each run, then the second of each, and so on, among the same.
        sizes: How many first ones there are, how many second ones, and so on.
        stays: Of each of `sizes` the runs whose states stay as they are then.
        own: [S], those in `order` that are not pending.
        own_rows: [S], where the same are among the step's.
    """

    def __init__(self, runs: Sequence[StateRun]) -> None:
        self.runs = runs = sorted(runs, key=lambda run: -run.count)
        counts = [run.count for run in runs]
        firsts = [0, *accumulate(counts)]
        places = [(run, i) for run in runs for i in range(run.count)]
        self.requests = torch.tensor([run.request for run in runs])
        self.goes_on = torch.tensor([run.goes_on for run in runs])
        self.lines = torch.tensor([run.line + i for run, i in places])
        self.sizes = [sum(count > i for count in counts) for i in range(counts[0])]
        order = [firsts[r] + i for i, n in enumerate(self.sizes) for r in range(n)]
        self.order = torch.tensor(order)
        self.stays = [
            torch.tensor(stay) if stay else None
            for stay in (
                [r for r in range(n) if runs[r].num_taken_in == i]
                for i, n in enumerate(self.sizes, 1)
            )
        ]
        own = [(at, *places[token]) for at, token in enumerate(order)]
        own = [(at, run, i) for at, run, i in own if i >= run.num_pending]
        self.own = torch.tensor([at for at, _, _ in own])
        self.own_rows = torch.tensor([run.start + i - run.num_pending for _, run, i in own])
        self._note_kept(places)

    def _note_kept(self, places: Sequence[tuple[StateRun, int]]) -> None:
        """Notes where pending tokens are kept, and where those of decodes will be."""
        pending = [(run, i) for run, i in places if i < run.num_pending]
        kept = [(run, i) for run, i in places if run.row is not None and i >= run.num_pending]
        self._pending, self._kept = (
            None
            if not tokens
            else torch.tensor([(run.row, run.first + i) for run, i in tokens]).unbind(1)
            for tokens in (pending, kept)
        )
        self._kept_rows = torch.tensor([run.start + i - run.num_pending for run, i in kept])
        at, sources = 0, []
        for run, i in places:
            is_pending = i < run.num_pending
            sources.append(at if is_pending else len(pending) + run.start + i - run.num_pending)
            at += is_pending
        self.sources = torch.tensor(sources)

    def blocks(self, metadata: StateMetadata) -> Tensor:
        """Returns those that hold the states of the runs, [n] int64."""
        return metadata.blocks.index_select(0, self.requests).long()

    def with_pending(self, own: Tensor, kept: Tensor | None) -> list[Tensor]:
        """Returns what `sources` points into, in parts: what is kept of pending tokens, then `own`
        of the step's. Keeps those of decodes with drafts; tokens are kept at their place modulo the
        length of `kept` [rows, ., W]."""
        parts = [own]
        if self._pending is not None:
            assert kept is not None
            rows, places = self._pending
            parts.insert(0, kept[rows, places % kept.shape[1]])
        if self._kept is not None:
            assert kept is not None
            rows, places = self._kept
            kept[rows, places % kept.shape[1]] = own.index_select(0, self._kept_rows)
        return parts


def state_runs(metadata: StateMetadata) -> StateRuns | None:
    """Returns the runs of all requests that are no padding; None: there are none."""
    return _runs_of(_Batch.of(metadata))


@lru_cache(maxsize=4)
def _runs_of(batch: _Batch) -> StateRuns | None:
    runs = batch.runs()
    return StateRuns(runs) if runs else None


@dataclass(frozen=True, slots=True)
class Windows:
    """Says where the tokens of runs are, each run's behind the K - 1 inputs before it.

    Attributes:
        sources: [W], of all among the old inputs of all runs and, behind these, what
            `StateRuns.sources` points into.
        begins: [T], where the K inputs of each token begin.
        stay: [n, K - 1], the inputs that stay.
    """

    sources: Tensor
    begins: Tensor
    stay: Tensor


@lru_cache(maxsize=4)
def windows_of(runs: StateRuns, width: int) -> Windows:
    """Returns where the inputs of convolutions of that width are."""
    old, first, tokens = width - 1, 0, runs.sources.tolist()
    sources, begins, stay = list[int](), list[int](), list[range]()
    for r, run in enumerate(runs.runs):
        behind, begin = first + run.count, first + r * old
        sources += range(r * old, (r + 1) * old)
        sources += [len(runs.runs) * old + token for token in tokens[first:behind]]
        begins += range(begin, begin + run.count)
        stay.append(range(begin + run.num_taken_in, begin + run.num_taken_in + old))
        first = behind
    stays = torch.tensor(stay, dtype=torch.int64)
    return Windows(torch.tensor(sources), torch.tensor(begins), stays)


class Lockstep:
    """Goes through the tokens of all runs at once: the first of each, then the second of each, and
    so on. Runs are sorted by length, so that those that still go on are the leading ones.

    Attributes:
        lines: [T], of all tokens in that order, among the rows of `causal_conv`.
    """

    def __init__(self, runs: StateRuns, states: Tensor, metadata: StateMetadata) -> None:
        self._runs, self._blocks = runs, runs.blocks(metadata)
        self.lines = runs.lines[runs.order]
        self._states, goes_on = states, runs.goes_on
        found = states[self._blocks]
        self._now = torch.where(goes_on.view(-1, *[1] * (found.dim() - 1)), found, 0.0)
        self._stays = self._now.clone()
        self._num_gone = 0

    def gates(self, gates: Tensor, kept: Tensor | None) -> Tensor:
        """Returns the gates of all tokens, and keeps those of decodes with drafts."""
        parts = self._runs.with_pending(gates, kept)
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found.index_select(0, self._runs.sources[self._runs.order])

    def steps(self, part: Tensor) -> tuple[Tensor, ...]:
        """Returns `part` [T, ...] of the tokens in their order, cut into steps."""
        return part.split_with_sizes(self._runs.sizes)

    def states(self) -> Tensor:
        """Returns those of the runs that go on, before the step."""
        return self._now[: self._runs.sizes[self._num_gone]]

    def go(self, states: Tensor) -> None:
        """Ends a step, with the states behind it."""
        self._now = states
        stay = self._runs.stays[self._num_gone]
        self._num_gone += 1
        if stay is not None:
            self._stays[stay] = states[stay]

    def end(self, read: Sequence[Tensor], out: Tensor) -> None:
        """Keeps the states, and writes what was read in each step, of tokens that are not
        pending."""
        self._states[self._blocks] = self._stays
        out[self._runs.own_rows] = (
            torch.cat(list(read)).index_select(0, self._runs.own).to(out.dtype)
        )
