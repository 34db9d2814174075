"""Log probabilities of sampled tokens, from the logits as the model gave them.

1. `LogprobsRequest` notes, on the host, which places of a batch want how many, and keeps
   their raw logits before the sampler changes them.
2. `compute` looks up the chosen tokens and the likeliest ones, or those that a request names.
3. `LogprobsTensors` goes to the host with the step's tokens and is cut to what each asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch.buffer_utils import to_device
from engine.batch.input_batch import Int32Array
from engine.contracts.outputs import TokenLogprobs
from engine.sample.states import NO_LOGPROBS
from tandem_kernels import ops


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """N places of requests that asked; K is the largest number of other tokens among them."""

    cells: list[int]
    """[N], where the chosen token may be among those of the batch: see `Places.cells`."""
    num_top: list[int]
    """[N], tokens besides the chosen one that each asked for."""
    token_ids: torch.Tensor
    """[N, 1 + K] int64, the chosen token first."""
    logprobs: torch.Tensor
    """[N, 1 + K] float32."""
    ranks: torch.Tensor
    """[N] int64."""

    def to_host(self) -> LogprobsTensors:
        """Starts the copies, without waiting."""
        return LogprobsTensors(
            cells=self.cells,
            num_top=self.num_top,
            token_ids=self.token_ids.to("cpu", non_blocking=True),
            logprobs=self.logprobs.to("cpu", non_blocking=True),
            ranks=self.ranks.to("cpu", non_blocking=True),
        )

    @staticmethod
    def joined(parts: list[LogprobsTensors]) -> LogprobsTensors | None:
        """Returns parts that asked for equally many, one behind the other; None for no parts."""
        if not parts:
            return None
        return LogprobsTensors(
            cells=[cell for part in parts for cell in part.cells],
            num_top=[num for part in parts for num in part.num_top],
            token_ids=torch.cat([part.token_ids for part in parts]),
            logprobs=torch.cat([part.logprobs for part in parts]),
            ranks=torch.cat([part.ranks for part in parts]),
        )

    def by_cell(self) -> dict[int, TokenLogprobs]:
        """Returns what each place asked for. Call it after the copies have ended."""
        token_ids, logprobs = self.token_ids.tolist(), self.logprobs.tolist()
        ranks = self.ranks.tolist()
        return {
            cell: TokenLogprobs(
                token_ids=token_ids[i][: 1 + num_top],
                logprobs=logprobs[i][: 1 + num_top],
                rank=ranks[i],
            )
            for i, (cell, num_top) in enumerate(zip(self.cells, self.num_top, strict=True))
        }


class LogprobsRequest:
    """The part of a batch that wants log probabilities; at least one request does."""

    def __init__(
        self,
        logits: torch.Tensor,
        wanted: Int32Array,
        cells: Int32Array,
        keep: bool,
        named: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Keeps raw logits. `wanted` [L] is `NO_LOGPROBS` or how many. `keep`: `logits` [L, V] will
        be changed. `named`: places that want certain tokens instead of the likeliest, `wanted` of
        them."""
        chosen = np.flatnonzero(wanted != NO_LOGPROBS)
        self._chosen = chosen
        self._cells: list[int] = cells[chosen].tolist()
        self._num_top: list[int] = wanted[chosen].tolist()
        places = chosen.tolist() if named else ()
        self._named = {i: named[at] for i, at in enumerate(places) if named and at in named}
        plain = (num for i, num in enumerate(self._num_top) if i not in self._named)
        self._num_plain = max(plain, default=0)
        self._device = logits.device
        self._index = to_device(chosen, self._device)
        whole_batch = len(chosen) == len(wanted) and not keep
        self._logits = logits if whole_batch else logits.index_select(0, self._index)

    def compute(self, token_ids: torch.Tensor) -> LogprobsTensors:
        """Returns log probabilities of the chosen `token_ids` [L] and of others."""
        kept = list(range(len(self._cells)))
        return self._look_up(
            self._logits, token_ids.index_select(0, self._index), kept, self._cells
        )

    def compute_at(
        self, places: Int32Array, token_ids: torch.Tensor, first_cell: int
    ) -> list[LogprobsTensors]:
        """Returns the same for other tokens [D] chosen at `places` [D], which may repeat: in one
        part, or in none where nothing asked. Their cells are numbered from `first_cell` on."""
        kept = np.searchsorted(self._chosen, places)
        asked = np.flatnonzero(self._chosen[np.minimum(kept, len(self._chosen) - 1)] == places)
        if not len(asked):
            return []
        logits = self._logits.index_select(0, to_device(kept[asked], self._device))
        chosen = token_ids.index_select(0, to_device(asked, self._device))
        cells = (first_cell + asked).tolist()
        return [self._look_up(logits, chosen, kept[asked].tolist(), cells)]

    def _look_up(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        kept: list[int],
        cells: list[int],
    ) -> LogprobsTensors:
        """Returns log probabilities in `logits` [N, V], which are those of `kept` places [N]."""
        ids, logprobs, ranks = ops.topk_logprobs(logits, token_ids, self._num_plain)
        if self._named:
            missing = max(self._num_top) - self._num_plain
            ids, logprobs = (F.pad(part, (0, missing)) for part in (ids, logprobs))
            self._look_up_named(logits, kept, ids, logprobs)
        num_top = [self._num_top[i] for i in kept]
        return LogprobsTensors(cells, num_top, ids, logprobs, ranks)

    def _look_up_named(
        self,
        logits: torch.Tensor,
        kept: list[int],
        ids: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        """Writes the named tokens behind the chosen ones, in `ids` and `logprobs` [N, 1 + K]."""
        rows = [row for row, i in enumerate(kept) if i in self._named]
        if not rows:
            return
        wanted = np.zeros((len(rows), ids.shape[1] - 1), np.int64)
        for line, row in zip(wanted, rows, strict=True):
            named = self._named[kept[row]]
            line[: len(named)] = named
        at, tokens = to_device(np.array(rows), ids.device), to_device(wanted, ids.device)
        of_rows = logits.index_select(0, at)
        found = of_rows.gather(1, tokens) - of_rows.logsumexp(1, keepdim=True)
        ids[:, 1:].index_copy_(0, at, tokens)
        logprobs[:, 1:].index_copy_(0, at, found)
