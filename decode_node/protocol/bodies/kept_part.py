"""The part of a long prompt that `truncate_prompt_tokens` and `truncation_side` keep."""

from __future__ import annotations

from typing import NamedTuple


class KeptPart(NamedTuple):
    """Says how many tokens of a longer prompt are kept, and whether they are its first or its
    last ones."""

    num_tokens: int
    is_front: bool = False

    def of(self, token_ids: list[int]) -> list[int]:
        """Returns the part of `token_ids` that is kept."""
        return token_ids[: self.num_tokens] if self.is_front else token_ids[-self.num_tokens :]
