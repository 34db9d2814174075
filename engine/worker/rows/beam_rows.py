"""Beams that keep their rows: the device chooses who lives on, and moves tables and states to them.

1. `add_request` notes the row of each beam of a search; with the last one the search is complete.
2. `choose`, in every step, behind the candidates of all its rows: the next beams, in place of the
   tokens that were drawn. A row whose beam continues that of another row gets its table, and copies
   of the block that is being written and of states. The next step finds everything in place.
3. `remove_request`: all rows of a search leave in one step.

    rows of a search      table                       that being written
    continued twice      [ b0 ][ b1 ][ b2 ]              b3 ───┐ copied
    continued by none  [ b0 ][ b4 ][ b5 ]              b6 ◀──┘
                         [ b0 ][ b1 ][ b2 ] afterwards

The scheduler learns of the candidates, chooses alike, and moves its references to blocks in the
same way (`engine.sched.choices.beams`): blocks that a row has lost are given to none before the
steps that may read them are over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.batch.block_table import BlockTables
from engine.batch.buffer_utils import to_device, to_device_together
from engine.batch.places import Int32Array
from engine.batch.row_states import RowError, RowStates
from engine.contracts.scheduler_output import NewRequestData
from engine.sample.beam_choice import choose_beams
from engine.sample.logprobs import LogprobsTensors
from engine.sample.sampler import SamplerOutput
from tandem_kernels import ops


@dataclass(slots=True)
class _Search:
    """One search. `rows` [W] by seat, -1 until their beams have come; `scores` [W] of those. Each
    has `num_candidates`."""

    stop_ids: tuple[int, ...]
    num_candidates: int
    rows: list[int]
    scores: list[float]
    is_new: bool = True


class BeamRows:
    """Owns scores and ranks of beams, by row. `states` and `tables` (of each KV group) are those of
    the runner, all on `device`."""

    def __init__(
        self, states: RowStates, tables: Sequence[BlockTables], device: torch.device
    ) -> None:
        self._states, self._tables, self._device = states, tables, device
        self._searches: dict[int, _Search] = {}
        self._search_of: dict[int, int] = {}  # [row]
        self._scores = torch.zeros(states.max_num_reqs, dtype=torch.float64, device=device)
        self._ranks = torch.zeros(states.max_num_reqs, dtype=torch.int64, device=device)

    def add_request(self, new: NewRequestData) -> None:
        seat = new.beam
        if seat is None:
            return
        search = self._searches.get(seat.search)
        if search is None:
            no_rows, nothing = [-1] * seat.width, [0.0] * seat.width
            search = _Search(seat.stop_ids, seat.num_candidates, no_rows, nothing)
            self._searches[seat.search] = search
        search.rows[seat.index], search.scores[seat.index] = new.row, seat.score
        self._search_of[new.row] = seat.search

    def remove_request(self, row: int) -> None:
        number = self._search_of.pop(row, None)
        if number is not None:
            self._searches.pop(number, None)

    def choose(self, sampled: SamplerOutput, rows: Int32Array, pages: Tensor) -> SamplerOutput:
        """Chooses the next beams of the searches that have rows in a step.

        Args:
            sampled: What was drawn in `rows`, one token each, and their candidates.
            pages: [slots, blocks, bytes of a page], the cache.

        Raises:
            RowError: A step computes some beams of a search and not the others.
        """
        if not self._searches:
            return sampled
        place_of = {row: place for place, row in enumerate(rows.tolist())}
        token_ids = sampled.token_ids
        for searches in self._by_size(place_of):
            assert sampled.logprobs is not None
            self._begin(searches)
            token_ids = self._choose(searches, place_of, sampled.logprobs, token_ids, pages)
        return replace(sampled, token_ids=token_ids)

    def _by_size(self, place_of: dict[int, int]) -> Iterable[list[_Search]]:
        """Returns the searches of a step, those of one width and number of candidates together."""
        by_size: dict[tuple[int, int], list[_Search]] = {}
        for number, search in self._searches.items():
            here = [row in place_of for row in search.rows]
            if not any(here):
                continue
            if not all(here):
                raise RowError(f"some beams of search {number} compute without the others")
            size = len(search.rows), search.num_candidates
            by_size.setdefault(size, []).append(search)
        return by_size.values()

    def _begin(self, searches: Sequence[_Search]) -> None:
        """Writes the scores of searches that have just come, whose seats are in order of rank."""
        new = [search for search in searches if search.is_new]
        if not new:
            return
        for search in new:
            search.is_new = False
        rows = np.array([row for search in new for row in search.rows], np.int64)
        scores = np.array([score for search in new for score in search.scores])
        ranks = np.concatenate([np.arange(len(search.rows)) for search in new])
        at = to_device(rows, self._device)
        self._scores.index_copy_(0, at, to_device(scores, self._device))
        self._ranks.index_copy_(0, at, to_device(ranks, self._device))

    def _choose(
        self,
        searches: Sequence[_Search],
        place_of: dict[int, int],
        found: LogprobsTensors,
        token_ids: Tensor,
        pages: Tensor,
    ) -> Tensor:
        """Returns `token_ids` with the next tokens of these searches, which are alike in size."""
        rows_np = np.array([search.rows for search in searches], np.int64)
        places = np.array([place_of[row] for row in rows_np.ravel().tolist()], np.int64)
        index_of = {cell: index for index, cell in enumerate(found.cells)}
        indices = np.array([index_of[place] for place in places.tolist()], np.int64)
        most = max(1, *(len(search.stop_ids) for search in searches))
        stops = np.full((len(searches), most), -1, np.int64)
        for line, search in zip(stops, searches, strict=True):
            line[: len(search.stop_ids)] = search.stop_ids
        written = self._states.num_computed_np[rows_np.ravel()].astype(np.int64) + 1
        rows, at, index, stop_ids, num_written = to_device_together(
            [rows_np.ravel(), places, indices, stops.ravel(), written], self._device
        )
        shape, last = rows_np.shape, 1 + searches[0].num_candidates
        chosen = choose_beams(
            found.token_ids.index_select(0, index)[:, 1:last].reshape(*shape, -1),
            found.logprobs.index_select(0, index)[:, 1:last].reshape(*shape, -1),
            self._scores.index_select(0, rows).view(shape),
            self._ranks.index_select(0, rows).view(shape),
            stop_ids.view(len(searches), most),
        )
        self._scores.index_copy_(0, rows, chosen.scores.flatten())
        self._ranks.index_copy_(0, rows, chosen.ranks.flatten())
        parents = rows.view(shape).gather(1, chosen.parents).flatten()
        for tables in self._tables:
            ops.copy_blocks(pages, _follow(tables, rows, parents, num_written))
        return token_ids.index_copy(0, at, chosen.token_ids.view(-1, 1))


def _follow(tables: BlockTables, rows: Tensor, parents: Tensor, num_written: Tensor) -> Tensor:
    """Gives rows the tables of their parents, up to the block behind the first `num_written`
    tokens, all of which are [N]. Returns the copies of what lies in that block: [N, 2] int32."""
    table, block_size = tables.tensor, tables.block_size
    own, of_parents = table.index_select(0, rows), table.index_select(0, parents)
    current = (num_written // block_size).unsqueeze(1)
    columns = torch.arange(table.shape[1], device=table.device)
    table.index_copy_(0, rows, torch.where(columns < current, of_parents, own))
    is_copied = (num_written % block_size > 0) & (parents != rows)
    current = current.clamp(max=table.shape[1] - 1)
    source, target = of_parents.gather(1, current), own.gather(1, current)
    return torch.cat([source.where(is_copied.unsqueeze(1), -1), target], dim=1).int()
