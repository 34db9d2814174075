"""Amounts added to single logits: what the user asked for, and -inf on tokens that would end the
output too early. Where a grammar decides what may come next, it minds `min_tokens` itself: it knows
whether anything but an end is left.

    1. `add_request` keeps a row's tokens on the host; most rows have none.
    2. `apply` adds those of a batch in one operation.
    3. `remove_request` forgets them.

Nothing is staged: entries are few, and which apply depends on the length, so they travel with the
step that needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.buffer_utils import to_device_together
from engine.batch.places import Int32Array, Places
from engine.contracts.sampling_params import SamplingParams
from tandem_kernels import ops

_ALWAYS = 2**31 - 1
"""A length that no sequence reaches."""


@dataclass(frozen=True, slots=True)
class _RowBias:
    """`ending_ids` are forbidden while the sequence is shorter than `min_len` tokens."""

    token_ids: npt.NDArray[np.int32]
    amounts: npt.NDArray[np.float32]
    ending_ids: npt.NDArray[np.int32]
    min_len: int


class LogitBiasStates:
    """Rows that change single logits."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._device = device
        self._biases: dict[int, _RowBias] = {}  # row -> bias
        self._has_bias = np.zeros(max_num_reqs, np.bool_)  # [row]

    def add_request(
        self, row: int, sampling: SamplingParams, prompt_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        min_tokens = 0 if sampling.grammar else sampling.min_tokens
        if not sampling.logit_bias and min_tokens == 0:
            return
        ending = {*eos_token_ids, *sampling.stop_token_ids} if min_tokens else set()
        self._biases[row] = _RowBias(
            token_ids=np.array(list(sampling.logit_bias), np.int32),
            amounts=np.array(list(sampling.logit_bias.values()), np.float32),
            ending_ids=np.array(sorted(ending), np.int32),
            min_len=prompt_len + min_tokens,
        )
        self._has_bias[row] = True

    def remove_request(self, row: int) -> None:
        self._biases.pop(row, None)
        self._has_bias[row] = False

    def needed_by(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` may have something to add."""
        return bool(self._biases) and bool(self._has_bias[rows].any())

    def apply(self, logits: torch.Tensor, places: Places, first_token: int = 0) -> None:
        """Changes `logits` [L, v] of all places, which are of tokens `first_token` and on. Where
        only the device knows how many tokens are before a place, it decides which ending tokens
        come too early."""
        index: list[npt.NDArray[np.int32]] = []
        token_ids: list[npt.NDArray[np.int32]] = []
        amounts: list[npt.NDArray[np.float32]] = []
        min_lens: list[npt.NDArray[np.int32]] = []

        def add(place: int, ids: npt.NDArray[np.int32], values: Any, min_len: int) -> None:
            local = ids - first_token
            is_here = (local >= 0) & (local < logits.shape[1])
            if is_here.any():
                ids, values = local[is_here], np.broadcast_to(np.float32(values), len(ids))[is_here]
                index.append(np.full(len(ids), place, np.int32))
                token_ids.append(ids)
                amounts.append(values)
                min_lens.append(np.full(len(ids), min_len, np.int32))

        for place in np.flatnonzero(self._has_bias[places.rows]).tolist():
            bias = self._biases[int(places.rows[place])]
            add(place, bias.token_ids, bias.amounts, _ALWAYS)
            if not places.has_exact_lens or places.max_seq_lens[place] < bias.min_len:
                add(place, bias.ending_ids, -np.inf, bias.min_len)
        if not index:
            return
        entries = [np.concatenate(parts) for parts in (index, token_ids, amounts, min_lens)]
        at, ids, values, until = to_device_together(entries, self._device)
        if not places.has_exact_lens:
            values = torch.where(places.seq_lens.index_select(0, at) < until, values, 0.0)
        ops.add_sparse(logits, at, ids, values)
