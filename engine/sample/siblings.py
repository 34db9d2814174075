"""Draws the first tokens of several answers from the logits of one prompt.

Answers to the same prompt differ in their seeds alone, so up to their first token they are one
request: one row computes the prompt, and draws for all of them.

    1. `add_request` keeps the seeds of a row's further answers; most rows have none.
    2. `draw` takes the logits of the row's only place, as the row's own token was drawn from them,
       and draws one token for each seed. A few at a time, as each has a copy of the logits.
    3. `remove_request` forgets the seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch.buffer_utils import to_device
from engine.batch.places import Int32Array, Places
from engine.contracts.outputs import RowSiblings, SiblingTokens
from engine.contracts.scheduler_output import NewRequestData
from engine.sample.logprobs import LogprobsRequest, LogprobsTensors

DRAWS_AT_ONCE = 16
"""Rows of logits that are copied at a time."""

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Draws [D] int64 from (logits [D, V], rows [D] int32, tokens before each place [D], seeds [D])."""


@dataclass(frozen=True, slots=True)
class SiblingTensors:
    """The tokens of K further answers. `rows[i]` is the row whose prompt answer i has."""

    rows: list[int]
    token_ids: torch.Tensor
    """[K] int64."""
    logprobs: LogprobsTensors | None
    """Theirs that asked for them, by index in `token_ids`."""

    def to_host(self) -> SiblingTensors:
        """Starts the copies, without waiting."""
        return SiblingTensors(
            self.rows,
            self.token_ids.to("cpu", non_blocking=True),
            None if self.logprobs is None else self.logprobs.to_host(),
        )

    def by_row(self, epochs: dict[int, int]) -> list[RowSiblings]:
        """Returns the tokens of each row, in the order of its seeds. Call it after the copies have
        ended. `epochs`: by row."""
        found: dict[int, RowSiblings] = {}
        logprobs = {} if self.logprobs is None else self.logprobs.by_cell()
        for index, (row, token_id) in enumerate(
            zip(self.rows, self.token_ids.tolist(), strict=True)
        ):
            if row not in found:
                found[row] = RowSiblings(row, epochs[row], SiblingTokens([]))
            tokens = found[row].tokens
            tokens.token_ids.append(token_id)
            if index in logprobs:
                tokens.logprobs.append(logprobs[index])
        return list(found.values())


class SiblingStates:
    """Keeps the seeds of rows that draw for several answers, on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seeds: dict[int, tuple[int, ...]] = {}

    def add_request(self, new: NewRequestData) -> None:
        if new.sibling_seeds:
            self._seeds[new.row] = new.sibling_seeds

    def remove_request(self, row: int) -> None:
        self._seeds.pop(row, None)

    def needed_by(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` draws for further answers."""
        return bool(self._seeds) and not self._seeds.keys().isdisjoint(rows.tolist())

    def draw(
        self,
        logits: torch.Tensor,
        places: Places,
        draw: Draw,
        logprobs: LogprobsRequest | None,
    ) -> SiblingTensors:
        """Draws for all rows that have seeds, each of which has one place. `logits` [L, V] are
        those that the rows' own tokens are drawn from; `logprobs` has kept what they were."""
        own = [i for i, row in enumerate(places.rows.tolist()) if row in self._seeds]
        seeds = [self._seeds[int(places.rows[i])] for i in own]
        at = np.repeat(np.array(own, np.int32), [len(of_row) for of_row in seeds])
        flat = np.array([seed for of_row in seeds for seed in of_row], np.uint64).view(np.int64)
        at_device, seeds_device = to_device(at, self._device), to_device(flat, self._device)
        drawn: list[torch.Tensor] = []
        found: list[LogprobsTensors] = []
        for start in range(0, len(at), DRAWS_AT_ONCE):
            part = slice(start, start + DRAWS_AT_ONCE)
            index = at_device[part]
            tokens = draw(
                logits.index_select(0, index),
                places.idx_mapping.index_select(0, index),
                places.seq_lens.index_select(0, index),
                seeds_device[part],
            )
            drawn.append(tokens)
            if logprobs is not None:
                found += logprobs.compute_at(at[part], tokens, start)
        return SiblingTensors(
            places.rows[at].tolist(), torch.cat(drawn), LogprobsTensors.joined(found)
        )
