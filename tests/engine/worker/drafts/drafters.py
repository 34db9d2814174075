"""Drafters of tests."""

from __future__ import annotations

import random

import torch

from tandem_kernels.batch.batch_tables import RowTables

NO_SUCH_TOKENS = (-1, 2**31, 2**62)


class KnowingDrafter:
    """Proposes what `answers` say of each prompt, and lies now and then.

    `answers`: prompt and output of requests; the longest one that goes on where a row is counts.
    `lies`: share of drafts that are wrong, or that no vocabulary has.
    `gaps`: share of rows that get fewer drafts than there could be.
    """

    def __init__(
        self, answers: list[list[int]], *, lies: float = 0.0, gaps: float = 0.0, seed: int = 0
    ) -> None:
        self.answers = answers
        self.num_calls = 0
        self._lies, self._gaps = lies, gaps
        self._rng = random.Random(seed)

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        self.num_calls += 1
        found = torch.full((len(idx_mapping), rows.max_drafts), -1, dtype=torch.int64)
        for index, row in enumerate(idx_mapping.tolist()):
            length = int(rows.total_len[row])
            known = rows.token_ids[row, :length].tolist()
            drafts = self._after(known)[: rows.max_drafts]
            if self._rng.random() < self._gaps:
                drafts = drafts[: self._rng.randrange(rows.max_drafts + 1)]
            drafts = [self._told(token) for token in drafts]
            found[index, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        return found.to(idx_mapping.device)

    def _after(self, known: list[int]) -> list[int]:
        for answer in self.answers:
            if len(answer) > len(known) and answer[: len(known)] == known:
                return answer[len(known) :]
        return []

    def _told(self, token: int) -> int:
        if self._rng.random() >= self._lies:
            return token
        return self._rng.choice([*NO_SUCH_TOKENS, token ^ 1, token + 2])


class RandomDrafter:
    """Proposes anything."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(seed)

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        shape = (len(idx_mapping), rows.max_drafts)
        return torch.randint(-5, self._vocab_size + 5, shape, generator=self._generator)


class RepeatingDrafter:
    """Proposes the last token again and again, without looking at it on the host."""

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        row = idx_mapping.long()
        last = rows.token_ids[row, rows.total_len[row].long() - 1].long()
        return last.unsqueeze(1).repeat(1, rows.max_drafts)
