"""Log probabilities of the prompts' own tokens, from the hidden states of the steps that compute
them.

    1. `add_request` notes how many a row wants, and how long its prompt is.
    2. `compute`, after the model ran: token p + 1 is looked up in the logits of position p, a few
       rows of logits at a time, so that logits of a whole prompt never exist.
    3. `PromptLogprobsTensors` go to the host with the step's tokens, for each row and step one, or
       several: nodes send them on, and messages have their limits.
    4. `remove_request` forgets the row.

Every chunk of a prompt gives its part; the first token has no log probability, because nothing
comes before it, and the last position of a prompt is the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch.input_batch import BatchOrder
from engine.batch.row_states import RowStates
from engine.contracts.outputs import PromptLogprobs, RowPromptLogprobs
from engine.contracts.scheduler_output import NewRequestData
from engine.sample.states import NO_LOGPROBS
from tandem_kernels import ops

_FEWEST_ROWS, _MOST_ROWS = 16, 256
"""Rows of logits at a time: enough to keep a GPU busy, and no more than sampling takes anyway."""
_MOST_TOKENS = 4096
"""Tokens of one `PromptLogprobsTensors`: 700 KB with 20 top tokens each."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsTensors:
    """N tokens of one prompt, K the top tokens that were asked for. int32 and float32."""

    row: int
    epoch: int
    first_position: int
    token_ids: torch.Tensor
    """[N, 1 + K], the prompt's token first."""
    logprobs: torch.Tensor
    """[N, 1 + K]."""
    ranks: torch.Tensor
    """[N]."""

    def to_host(self) -> PromptLogprobsTensors:
        """Starts the copies, without waiting."""
        tensors = (self.token_ids, self.logprobs, self.ranks)
        copies = (tensor.to("cpu", non_blocking=True) for tensor in tensors)
        return PromptLogprobsTensors(self.row, self.epoch, self.first_position, *copies)

    def packed(self) -> RowPromptLogprobs:
        """Returns the bytes for the host. Call it after the copies have ended."""
        return RowPromptLogprobs(
            self.row,
            self.epoch,
            PromptLogprobs(
                first_position=self.first_position,
                num_top=self.token_ids.shape[1] - 1,
                token_ids=self.token_ids.numpy().tobytes(),
                logprobs=self.logprobs.numpy().tobytes(),
                ranks=self.ranks.numpy().tobytes(),
            ),
        )


class PromptLogprobsStates:
    """Rows that want log probabilities of their prompts."""

    def __init__(self, max_num_reqs: int) -> None:
        self._num_top = np.full(max_num_reqs, NO_LOGPROBS, np.int32)  # [row]
        self._prompt_len = np.zeros(max_num_reqs, np.int32)  # [row]
        self._rows_at_once = min(_MOST_ROWS, max(_FEWEST_ROWS, max_num_reqs))

    def add_request(self, new: NewRequestData) -> None:
        asked = new.sampling.prompt_logprobs
        self._num_top[new.row] = NO_LOGPROBS if asked is None else asked
        self._prompt_len[new.row] = new.prompt_len

    def remove_request(self, row: int) -> None:
        self._num_top[row] = NO_LOGPROBS

    def needed_by(self, order: BatchOrder) -> bool:
        """Returns whether the step computes prompt tokens of a row that wants them. A decode, and
        what runs as one, computes the end of a prompt at most.
        """
        rows = order.rows[order.num_decodes :]
        return len(rows) > 0 and bool((self._num_top[rows] != NO_LOGPROBS).any())

    def compute(
        self,
        order: BatchOrder,
        hidden: torch.Tensor,
        states: RowStates,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[PromptLogprobsTensors]:
        """Looks up prompt tokens of a step. `hidden` is [T, H] of the step, whose tokens `states`
        does not count as computed yet."""
        if not self.needed_by(order):
            return []
        found = []
        starts = np.cumsum(order.query_lens) - order.query_lens
        for index in range(order.num_decodes, len(order.rows)):
            row, query_len = int(order.rows[index]), int(order.query_lens[index])
            first = int(states.num_computed_np[row]) + 1
            count = min(query_len, int(self._prompt_len[row]) - first)
            if self._num_top[row] == NO_LOGPROBS or count <= 0:
                continue
            epoch, num_top = int(states.epoch_np[row]), int(self._num_top[row])
            start = int(starts[index])
            before = torch.split(hidden[start : start + count], _MOST_TOKENS)
            tokens = torch.split(states.token_ids.tensor[row, first : first + count], _MOST_TOKENS)
            for part, token_ids in zip(before, tokens, strict=True):
                tensors = self._look_up(part, token_ids.long(), num_top, compute_logits)
                found.append(PromptLogprobsTensors(row, epoch, first, *tensors))
                first += len(part)
        return found

    def _look_up(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        num_top: int,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (ids, log probabilities, ranks) of `token_ids` [N] and the likeliest ones behind
        `hidden` [N, H]."""
        rows = self._rows_at_once
        parts = [
            ops.topk_logprobs(compute_logits(some), wanted, num_top)
            for some, wanted in zip(
                torch.split(hidden, rows), torch.split(token_ids, rows), strict=True
            )
        ]
        ids, logprobs, ranks = (torch.cat(part) for part in zip(*parts, strict=True))
        return ids.int(), logprobs, ranks.int()
