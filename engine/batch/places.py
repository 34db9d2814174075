"""Places: where a step chooses tokens.

A request whose known tokens are all computed has one place, behind the last of them. A decode has
one more behind each of its drafts, where the next token is chosen as if the drafts before it were
right. Places of one request lie together, in the order of the batch:

    query rows of a decode    last token     draft 1      draft 2      draft 3
    its places                     0            1            2            3
    chosen there                  s0           s1           s2           s3
    drafts that it takes for
    output                         -           d1          d1 d2       d1 d2 d3

`accept` keeps the longest beginning of drafts that are what was chosen in front of them, and the
token behind it: exactly those that would have been chosen one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

NO_TOKEN = -1

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Places:
    """L places of S requests; the first `num_decodes` requests have `decode_query_len` each, and
    the others one."""

    num_decodes: int
    decode_query_len: int
    rows: Int32Array
    """[L], row of each place."""
    max_seq_lens: Int32Array
    """[L], tokens before each place, or more: see `has_exact_lens`."""
    idx_mapping: torch.Tensor
    """[L] int32, the same as `rows`."""
    seq_lens: torch.Tensor
    """[L] int32, tokens before each place, drafts among them: the new token's index."""
    input_ids: torch.Tensor
    """[T] int32, of the step; the decodes' come first."""
    has_exact_lens: bool
    """Whether `max_seq_lens` are exact: neither this step nor any before it has drafts. Else only
    the device knows the lengths."""

    @property
    def has_drafts(self) -> bool:
        return self.decode_query_len > 1

    def cells(self) -> Int32Array:
        """Returns [L]: the index of each place in what `accept` returns, flattened."""
        width, of_decodes = self.decode_query_len, self.num_decodes * self.decode_query_len
        cells = np.arange(len(self.rows), dtype=np.int32)
        cells[of_decodes:] = of_decodes + width * (cells[of_decodes:] - of_decodes)
        return cells

    def first_places(self) -> Int32Array:
        """Returns [S]: the first place of each request."""
        num_others = len(self.rows) - self.num_decodes * self.decode_query_len
        places = np.arange(self.num_decodes + num_others, dtype=np.int32)
        places += (self.decode_query_len - 1) * np.minimum(places, self.num_decodes)
        return places

    def drafts_on_host(self) -> list[list[int]]:
        """Returns the drafts of each decode; empty in a step without. Waits for the device."""
        found: list[list[int]] = self._drafts.tolist() if self.has_drafts else []
        return found

    def drafts_before(self) -> torch.Tensor:
        """Returns [L, decode_query_len - 1] int32: the drafts that each place takes for output,
        then -1."""
        count = self.decode_query_len - 1
        found = self.idx_mapping.new_full((len(self.rows), count), NO_TOKEN)
        if count > 0 and self.num_decodes > 0:
            of_decodes = found[: self.num_decodes * (count + 1)].view(-1, count + 1, count)
            of_decodes.copy_(self._drafts.unsqueeze(1).expand_as(of_decodes))
            place = torch.arange(count + 1, device=found.device)
            of_decodes.masked_fill_(place[:count] >= place[:, None], NO_TOKEN)
        return found

    def accept(self, chosen: torch.Tensor) -> torch.Tensor:
        """Returns [S, decode_query_len] int64: the tokens that each request gets, then -1. `chosen`
        is [L] int64."""
        if not self.has_drafts:
            return chosen.unsqueeze(1)
        num_decodes, width = self.num_decodes, self.decode_query_len
        others = chosen[num_decodes * width :]
        tokens = chosen.new_full((num_decodes + len(others), width), NO_TOKEN)
        tokens[num_decodes:, 0] = others
        of_decodes = chosen[: num_decodes * width].view(num_decodes, width)
        is_right = (of_decodes[:, :-1] == self._drafts).long().cumprod(dim=1).bool()
        tokens[:num_decodes, 0] = of_decodes[:, 0]
        tokens[:num_decodes, 1:] = torch.where(is_right, of_decodes[:, 1:], NO_TOKEN)
        return tokens

    @property
    def _drafts(self) -> torch.Tensor:
        """Returns the drafts as the step computed them: [num_decodes, decode_query_len - 1]."""
        width = self.decode_query_len
        return self.input_ids[: self.num_decodes * width].view(-1, width)[:, 1:]
