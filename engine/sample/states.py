"""Sampling parameters of each row, and their selection for a batch.

1. `add_request` writes a row on the host.
2. what changed is carried to the device with `carried`.
3. `gather` picks the rows of a batch's places, in one operation.
4. `remove_request` has nothing to clear: the next owner writes every field.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.batch.buffer_utils import CarriedTensor, HostBackedTensor
from engine.batch.input_batch import Int32Array
from engine.contracts.sampling_params import SamplingParams
from tandem_kernels import ops

NO_LOGPROBS = -1

# Rows of the table of float parameters.
_TEMPERATURE, _TOP_P, _MIN_P = range(3)
_NUM_FLOATS = 3

_COLDEST = 1e-30
"""Logits over less are too large for float32. It would take the largest anyway, as 0 does."""


@dataclass(frozen=True, slots=True)
class BatchSamplingParams:
    """Parameters of the L places where a step chooses tokens, all `[L]`."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    """Int64, the index that each place's new token will have."""


class SamplingStates:
    """Holds the parameters of every row. `num_logprobs_np[row]` is the number of top log
    probabilities asked for, or `NO_LOGPROBS`."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        # [parameter, row], so that one selection serves all parameters of a kind.
        self._floats = HostBackedTensor((_NUM_FLOATS, max_num_reqs), np.float32, device)
        self._top_k = HostBackedTensor(max_num_reqs, np.int32, device)
        self._seeds = HostBackedTensor(max_num_reqs, np.int64, device)
        self.num_logprobs_np = np.full(max_num_reqs, NO_LOGPROBS, np.int32)
        self._logprob_token_ids: dict[int, tuple[int, ...]] = {}
        """The tokens by which some rows want log probabilities, instead of the likeliest."""

    def add_request(self, row: int, sampling: SamplingParams) -> None:
        temperature = sampling.temperature if sampling.temperature >= _COLDEST else 0.0
        floats = (temperature, sampling.top_p, sampling.min_p)
        self._floats.write((slice(None), row), floats)
        self._top_k.write(row, sampling.top_k)
        # The device has no unsigned 64-bit integers; the bits are what counts.
        self._seeds.write(row, np.uint64(sampling.seed).astype(np.int64))
        asked = sampling.logprobs
        self.num_logprobs_np[row] = NO_LOGPROBS if asked is None else asked
        self._logprob_token_ids.pop(row, None)
        if sampling.logprob_token_ids:
            self._logprob_token_ids[row] = sampling.logprob_token_ids

    @property
    def carried(self) -> list[CarriedTensor]:
        """Returns the arrays that are carried over before a step."""
        return [self._floats, self._top_k, self._seeds]

    def remove_request(self, row: int) -> None:
        self.num_logprobs_np[row] = NO_LOGPROBS
        self._logprob_token_ids.pop(row, None)

    def gather(self, idx_mapping: torch.Tensor, seq_lens: torch.Tensor) -> BatchSamplingParams:
        """Returns the parameters of places. `idx_mapping`, their rows, and `seq_lens` are [L] int32
        on the device; a row below 0 is none's."""
        tables = self._floats.tensor, self._top_k.tensor, self._seeds.tensor
        floats, top_k, seeds, positions = ops.pick_parameters(idx_mapping, seq_lens, *tables)
        return BatchSamplingParams(
            temperature=floats[_TEMPERATURE],
            top_k=top_k,
            top_p=floats[_TOP_P],
            min_p=floats[_MIN_P],
            seeds=seeds,
            positions=positions,
        )

    def has_filters(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` cuts its distribution."""
        _, top_p, min_p = self._floats.np[:, rows]
        return bool((self._top_k.np[rows] > 0).any() or (top_p < 1).any() or (min_p > 0).any())

    def logprobs_wanted(self, rows: Int32Array) -> Int32Array:
        """Returns for each batch position how many top log probabilities are wanted, or
        `NO_LOGPROBS`."""
        wanted: Int32Array = self.num_logprobs_np[rows]
        return wanted

    def logprob_token_ids(self, rows: Int32Array) -> dict[int, tuple[int, ...]]:
        """Returns for batch positions whose rows name tokens which ones."""
        named = self._logprob_token_ids
        return (
            {i: named[row] for i, row in enumerate(rows.tolist()) if row in named} if named else {}
        )
