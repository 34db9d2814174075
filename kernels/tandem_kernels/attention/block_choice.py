"""Says how blocks of a context are chosen, as a value that has no need of Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """The sizes of a choice; see `reference.block_sparse`.

    Attributes:
        size: Tokens of a block, a power of two.
        top_k: Blocks that a query attends to at most.
        local: Of these, its own and those just before it, which are not chosen by score.
    """

    size: int
    top_k: int
    local: int

    @property
    def num_tokens(self) -> int:
        """Returns up to how many tokens a context is attended as a whole."""
        return self.size * self.top_k
