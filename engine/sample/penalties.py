"""Counts the tokens of the few requests that ask for penalties.

Counting every token of the vocabulary for every row would take gigabytes, so rows that need it
borrow an entry of a pool, which grows by doubling and starts empty.

    1. `add_request` gives the row an entry and counts what is known: the prompt as a bit mask,
       output that exists already (a resumed request has some) as counts.
    2. row -> entry and the parameters are carried to the device with `carried`.
    3. `apply` changes the logits of a batch; `count` adds the tokens that became output.
    4. `remove_request` returns the entry.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.buffer_utils import CarriedTensor, HostBackedTensor, to_device, with_rows
from engine.batch.places import NO_TOKEN, Int32Array, Places
from engine.contracts.sampling_params import SamplingParams
from engine.sample.allowed_tokens import bit_mask
from tandem_kernels import ops

_NO_ENTRY = -1
_FIRST_CAPACITY = 4
_REPETITION, _PRESENCE, _FREQUENCY = range(3)


class PenaltyStates:
    """P entries of `[ceil(V / 32)]` prompt bits and `[V]` output counts, int32."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._entries = HostBackedTensor(max_num_reqs, np.int32, device)  # row -> entry
        self._entries.write(slice(None), _NO_ENTRY)
        self._params = HostBackedTensor((3, max_num_reqs), np.float32, device)  # [param, row]
        self._free: list[int] = []
        num_words = -(-vocab_size // 32)
        self._prompt_mask = torch.zeros((0, num_words), dtype=torch.int32, device=device)
        self._output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    @property
    def num_used_entries(self) -> int:
        return len(self._prompt_mask) - len(self._free)

    def add_request(
        self,
        row: int,
        sampling: SamplingParams,
        prompt: npt.NDArray[np.int32],
        output: npt.NDArray[np.int32],
    ) -> None:
        """Counts what is known. `output` has the tokens after the prompt that are known already."""
        if not sampling.needs_penalties:
            return
        entry = self._take_entry()
        self._entries.write(row, entry)
        self._params.write(
            (slice(None), row),
            (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        )
        self._prompt_mask[entry] = to_device(bit_mask(prompt, self._vocab_size), self._device)
        counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        self._output_counts[entry] = to_device(counts, self._device)

    @property
    def carried(self) -> list[CarriedTensor]:
        """Returns the arrays that are carried over before a step."""
        return [self._entries, self._params]

    def remove_request(self, row: int) -> None:
        entry = int(self._entries.np[row])
        if entry != _NO_ENTRY:
            self._free.append(entry)
            self._entries.write(row, _NO_ENTRY)

    def needed_by(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` has penalties."""
        return self.num_used_entries > 0 and bool((self._entries.np[rows] != _NO_ENTRY).any())

    def apply(self, logits: torch.Tensor, places: Places, first_token: int = 0) -> None:
        """Changes `logits` [L, v] of all places, which are of tokens `first_token`, a multiple of
        32, and on: drafts before a place count as output."""
        idx_mapping, end = places.idx_mapping, first_token + logits.shape[1]
        params = self._params.tensor.index_select(1, idx_mapping)
        drafts = places.drafts_before()
        if logits.shape[1] < self._vocab_size:
            is_here = (drafts >= first_token) & (drafts < end)
            drafts = torch.where(is_here, drafts - first_token, NO_TOKEN)
        ops.apply_penalties(
            logits,
            self._prompt_mask[:, first_token // 32 :],
            self._output_counts[:, first_token:end],
            self._entries.tensor.index_select(0, idx_mapping),
            params[_REPETITION],
            params[_PRESENCE],
            params[_FREQUENCY],
            drafts,
        )

    def count(self, token_ids: torch.Tensor, idx_mapping: torch.Tensor) -> None:
        """Counts `token_ids` [S, W] as output of the rows `idx_mapping` [S]; -1 counts nothing."""
        entries = self._entries.tensor.index_select(0, idx_mapping)
        if token_ids.shape[1] > 1:
            entries = entries.repeat_interleave(token_ids.shape[1])
        ops.count_tokens(self._output_counts, entries, token_ids.flatten())

    def _take_entry(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        used = len(self._prompt_mask)
        capacity = min(max(_FIRST_CAPACITY, 2 * used), len(self._entries.np))
        self._prompt_mask = with_rows(self._prompt_mask, capacity)
        self._output_counts = with_rows(self._output_counts, capacity)
        self._free.extend(range(capacity - 1, used - 1, -1))
