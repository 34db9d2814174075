"""Words that a request must not say, as sequences of tokens.

A word of one token is always forbidden. The last token of a longer one is forbidden where the
output so far ends with the tokens before it; the prompt does not count. Where nothing else is left
to choose from, the words of a request do not apply.

    1. `add_request` keeps a row's words on the host; most rows have none.
    2. `apply` decides on the device, from the tokens in front of each place: the host does not
       know the latest of them. The words of a batch stay there as long as its rows do.
    3. `remove_request` forgets them.

A place is where a token is chosen: a row, and the number of tokens before it. A row may have
several places in one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.batch.buffer_utils import to_device_together
from engine.batch.input_batch import Int32Array
from engine.contracts.sampling_params import SamplingParams
from tandem_kernels import ops

_ANY = -1
"""Matches, in a word's beginning, whatever stands there, or nothing."""


@dataclass(frozen=True, slots=True)
class _RowWords:
    """W words of a row; k is its longest beginning: all tokens but the last."""

    beginnings: Int32Array
    """[W, k], at the right; `_ANY` before it."""
    lasts: Int32Array
    """[W]."""
    prompt_len: int


@dataclass(frozen=True, slots=True)
class _BatchWords:
    """E words of all places of a batch, int32 on the device; K is the longest beginning."""

    places: torch.Tensor
    """[E], into the batch."""
    rows: torch.Tensor
    """[E], into the table of tokens."""
    beginnings: torch.Tensor
    """[E, K], at the right; `_ANY` before it."""
    lasts: torch.Tensor
    """[E]."""
    prompt_lens: torch.Tensor
    """[E]."""


class BadWordStates:
    """Rows that must not say some words. `token_ids`: all tokens of each row, on the device."""

    def __init__(self, max_num_reqs: int, token_ids: torch.Tensor) -> None:
        self._token_ids = token_ids
        self._words: dict[int, _RowWords] = {}  # row -> words
        self._has_words = np.zeros(max_num_reqs, np.bool_)  # [row]
        self._batch: tuple[bytes, _BatchWords] | None = None
        """Rows of the latest batch, and its words."""

    def add_request(self, row: int, sampling: SamplingParams, prompt_len: int) -> None:
        """Adds a request; one without bad words changes nothing."""
        if not sampling.bad_words:
            return
        words = sampling.bad_words
        width = max(map(len, words)) - 1
        filled = [(_ANY,) * (width - len(word) + 1) + word[:-1] for word in words]
        self._words[row] = _RowWords(
            beginnings=np.array(filled, np.int32).reshape(len(words), width),
            lasts=np.array([word[-1] for word in words], np.int32),
            prompt_len=prompt_len,
        )
        self._has_words[row] = True
        self._batch = None

    def remove_request(self, row: int) -> None:
        """Removes a request; a row without words is left alone."""
        if self._words.pop(row, None) is not None:
            self._has_words[row] = False
            self._batch = None

    def needed_by(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` has words."""
        return bool(self._words) and bool(self._has_words[rows].any())

    def apply(self, logits: torch.Tensor, rows: Int32Array, seq_lens: torch.Tensor) -> None:
        """Sets what would complete a word to -inf in `logits` [S, V].

        `rows` [S] and `seq_lens` [S] describe the places: `seq_lens` tokens of the row are before
        it. The latter is on the device.
        """
        words = self._of_batch(rows)
        hits = completes_word(words, self._token_ids, seq_lens)
        forbid(logits, words.places, words.lasts, hits)

    def _of_batch(self, rows: Int32Array) -> _BatchWords:
        key = rows.tobytes()
        if self._batch is None or self._batch[0] != key:
            self._batch = key, self._upload(rows)
        return self._batch[1]

    def _upload(self, rows: Int32Array) -> _BatchWords:
        places = np.flatnonzero(self._has_words[rows]).astype(np.int32)
        found = [self._words[row] for row in rows[places].tolist()]
        counts = [len(words.lasts) for words in found]
        width = max(words.beginnings.shape[1] for words in found)
        beginnings = np.concatenate([_widened(words.beginnings, width) for words in found])
        columns = [
            np.repeat(places, counts),
            np.repeat(rows[places], counts),
            beginnings.reshape(-1),
            np.concatenate([words.lasts for words in found]),
            np.repeat(np.array([words.prompt_len for words in found], np.int32), counts),
        ]
        on_device = to_device_together(columns, self._token_ids.device)
        on_device[2] = on_device[2].view(beginnings.shape)
        return _BatchWords(*on_device)


def _widened(beginnings: Int32Array, width: int) -> Int32Array:
    """Returns `beginnings` [W, k] as [W, width], the same at the right."""
    missing = width - beginnings.shape[1]
    return np.pad(beginnings, ((0, 0), (missing, 0)), constant_values=_ANY)


def forbid(
    logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, hits: torch.Tensor
) -> None:
    """Sets `logits[places[e], tokens[e]]` of [S, V] to -inf where `hits[e]`, and leaves a place as
    it was where nothing else would be left to choose from. `places`, `tokens`, `hits` are [E],
    contiguous; a pair may repeat."""
    at = (places.long(), tokens.long())
    before = logits[at]
    ops.add_sparse(logits, places, tokens, torch.where(hits, -torch.inf, 0.0))
    is_empty = logits.amax(dim=1) == -torch.inf  # [S]
    # Of a pair that repeats all write the same.
    logits[at] = torch.where(is_empty.index_select(0, places), before, logits[at])


def completes_word(
    words: _BatchWords, token_ids: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Returns [E] bool: whether the output before a word's place ends with its beginning.

    `token_ids` is [rows, L], of which the first `seq_lens[place]` tokens count. A row that runs on
    behind the end of a context may have a place beyond all L: what is chosen there is none's.
    """
    width = words.beginnings.shape[1]
    ends = seq_lens.index_select(0, words.places).unsqueeze(1)
    index = ends + torch.arange(-width, 0, device=token_ids.device)
    last = token_ids.shape[1] - 1
    tokens = token_ids[words.rows.long().unsqueeze(1), index.clamp(min=0, max=last)]
    is_output = index >= words.prompt_lens.unsqueeze(1)
    same = (tokens == words.beginnings) & is_output
    return (same | (words.beginnings == _ANY)).all(dim=1)
