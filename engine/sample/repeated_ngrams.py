"""Sequences of n tokens that a request must not say twice: `no_repeat_ngram_size`.

Where the output so far ends with the first n - 1 tokens of a sequence that it already holds, the
last token of that sequence is forbidden; the prompt does not count. Where nothing else is left to
choose from, all of them are allowed again.

    output        a b c d a b        n = 3
    beginning                 a b    the latest n - 1 tokens
    candidates        c d a b        tokens with n - 1 of the output before them
    forbidden         c              as a b stands before it

The device decides, from the tokens in front of each place: the host does not know the latest of
them, but how many there are at most. Short outputs cost nothing. A place is where a token is
chosen: a row, and the number of tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch.buffer_utils import to_device_together
from engine.batch.input_batch import Int32Array
from engine.batch.places import Places
from engine.contracts.sampling_params import SamplingParams
from engine.sample.bad_words import forbid

_MOST_COMPARED = 1 << 24
"""Pairs of tokens that are compared at once, one byte each."""
_FEWEST_CANDIDATES = 256
_MOST_CANDIDATES = 1 << 22
"""Tokens of outputs that are looked at together, of the places of a group: each takes about 50
bytes, which no measurement of memory sees, since outputs are short at the start. More of one place
alone are looked at nevertheless."""


@dataclass(frozen=True, slots=True)
class _Group:
    """E places whose sequences have `size` tokens; int32 on the device.

    Attributes:
        places: [E], into the batch.
        rows: [E], into the table of tokens.
        prompt_lens: [E].
        num_candidates: The places have at most this many tokens of output.
    """

    size: int
    places: torch.Tensor
    rows: torch.Tensor
    prompt_lens: torch.Tensor
    num_candidates: int


class RepeatedNgramStates:
    """Rows that must not repeat themselves. `token_ids` [rows, L]: all tokens of each row, on the
    device."""

    def __init__(self, max_num_reqs: int, token_ids: torch.Tensor) -> None:
        self._token_ids = token_ids
        self._sizes = np.zeros(max_num_reqs, np.int32)  # [row]; 0: it may
        self._prompt_lens = np.zeros(max_num_reqs, np.int32)  # [row]
        self._num_rows = 0

    def add_request(self, row: int, sampling: SamplingParams, prompt_len: int) -> None:
        """Adds a request; one that may repeat itself changes nothing."""
        if sampling.no_repeat_ngram_size:
            self._sizes[row] = sampling.no_repeat_ngram_size
            self._prompt_lens[row] = prompt_len
            self._num_rows += 1

    def remove_request(self, row: int) -> None:
        """Removes a request; a row that may repeat itself is left alone."""
        if self._sizes[row]:
            self._sizes[row] = 0
            self._num_rows -= 1

    def needed_by(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` must not repeat itself."""
        return self._num_rows > 0 and bool(self._sizes[rows].any())

    def apply(self, logits: torch.Tensor, places: Places) -> None:
        """Sets what would repeat a sequence to -inf in `logits` [S, V], of the tokens at
        `places`."""
        for group in self._groups(places):
            seq_lens = places.seq_lens.index_select(0, group.places)
            found = list(self._candidates(group, seq_lens))
            tokens = torch.cat([tokens for tokens, _ in found], dim=1)
            hits = torch.cat([hits for _, hits in found], dim=1)
            # Of a single place `reshape` would give a view of one number, which no kernel walks.
            at_places = group.places.unsqueeze(1).expand_as(tokens).contiguous().reshape(-1)
            forbid(logits, at_places, tokens.reshape(-1), hits.reshape(-1))

    def _groups(self, places: Places) -> Iterator[_Group]:
        """Yields the places of each size whose outputs are long enough to repeat something, the
        longest first, and as many at a time as memory has room for."""
        sizes, num_output = self._sizes[places.rows], self._output_lens(places)
        is_long = (sizes > 0) & (num_output >= sizes)
        for size in np.unique(sizes[is_long]).tolist():
            left = np.flatnonzero(is_long & (sizes == size)).astype(np.int32)
            left = left[np.argsort(-num_output[left], kind="stable")]
            while len(left):
                # The first has most.
                most = int(num_output[left[0]])
                found, left = np.split(left, [max(1, _MOST_CANDIDATES // most)])
                rows = places.rows[found]
                columns = [found, rows, self._prompt_lens[rows]]
                at, rows_of, lens = to_device_together(columns, self._token_ids.device)
                yield _Group(size, at, rows_of, lens, most)

    def _output_lens(self, places: Places) -> Int32Array:
        """Returns [S]: tokens of the output before each place, or more."""
        lens: Int32Array = places.max_seq_lens - self._prompt_lens[places.rows]
        return lens

    def _candidates(
        self, group: _Group, seq_lens: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields tokens of the outputs, and whether each completes a sequence that is there:
        [E, W] each, for as many at a time as can be compared at once. `seq_lens` is [E]."""
        width = group.size - 1
        ends, begins = seq_lens.unsqueeze(1), group.prompt_lens.unsqueeze(1)
        device = self._token_ids.device
        latest = self._tokens(group, ends + torch.arange(-width, 0, device=device))  # [E, width]
        at_once = max(_FEWEST_CANDIDATES, _MOST_COMPARED // (max(1, width) * len(seq_lens)))
        for first in range(width, group.num_candidates, at_once):
            count = min(at_once, group.num_candidates - first)
            index = begins + torch.arange(first - width, first + count, device=device)
            tokens = self._tokens(group, index)  # [E, width + count]
            is_known = index[:, width:] < ends
            hits = is_known & (ends - begins >= width)
            if width:
                windows = tokens.unfold(1, width, 1)[:, :count]  # [E, count, width]
                hits = hits & (windows == latest.unsqueeze(1)).all(dim=2)
            yield tokens[:, width:], hits

    def _tokens(self, group: _Group, index: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of the group's rows at `index` [E, W]; any where there is none."""
        last = self._token_ids.shape[1] - 1
        return self._token_ids[group.rows.long().unsqueeze(1), index.clamp(min=0, max=last).long()]
