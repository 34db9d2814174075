"""Log probabilities of sampled tokens, from the logits as the model gave them.

1. `LogprobsRequest` notes, on the host, which places of a batch want how many, and keeps
   their raw logits before the sampler changes them.
2. `compute` looks up the chosen tokens and the likeliest ones.
3. `LogprobsTensors` goes to the host with the step's tokens and is cut to what each asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.batch.buffer_utils import to_device
from engine.batch.input_batch import Int32Array
from engine.outputs import TokenLogprobs
from engine.sample.states import NO_LOGPROBS
from tandem_kernels import ops


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """N places of requests that asked; K is the largest number of top tokens among them."""

    cells: list[int]
    """[N], where the chosen token may be among those of the batch: see `Places.cells`."""
    num_top: list[int]
    """[N], top tokens that each asked for."""
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
        self, logits: torch.Tensor, wanted: Int32Array, cells: Int32Array, keep: bool
    ) -> None:
        """Keeps raw logits. `wanted` [L] is `NO_LOGPROBS` or how many. `keep`: `logits` [L, V] will
        be changed."""
        chosen = np.flatnonzero(wanted != NO_LOGPROBS)
        self._chosen = chosen
        self._cells: list[int] = cells[chosen].tolist()
        self._num_top: list[int] = wanted[chosen].tolist()
        self._index = to_device(chosen, logits.device)
        whole_batch = len(chosen) == len(wanted) and not keep
        self._logits = logits if whole_batch else logits.index_select(0, self._index)

    def compute(self, token_ids: torch.Tensor) -> LogprobsTensors:
        """Returns log probabilities of the chosen `token_ids` [L] and of the likeliest ones."""
        ids, logprobs, ranks = ops.topk_logprobs(
            self._logits, token_ids.index_select(0, self._index), max(self._num_top)
        )
        return LogprobsTensors(self._cells, self._num_top, ids, logprobs, ranks)

    def compute_at(
        self, places: Int32Array, token_ids: torch.Tensor, first_cell: int
    ) -> list[LogprobsTensors]:
        """Returns the same for other tokens [D] chosen at `places` [D], which may repeat: in one
        part, or in none where nobody asked. Their cells are numbered from `first_cell` on."""
        kept = np.searchsorted(self._chosen, places)
        asked = np.flatnonzero(self._chosen[np.minimum(kept, len(self._chosen) - 1)] == places)
        if not len(asked):
            return []
        device = self._logits.device
        logits = self._logits.index_select(0, to_device(kept[asked], device))
        chosen = token_ids.index_select(0, to_device(asked, device))
        ids, logprobs, ranks = ops.topk_logprobs(logits, chosen, max(self._num_top))
        num_top = [self._num_top[place] for place in kept[asked].tolist()]
        cells = (first_cell + asked).tolist()
        return [LogprobsTensors(cells, num_top, ids, logprobs, ranks)]
