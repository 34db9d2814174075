"""Says how tokens are put together in rows, as values that have no need of Triton.

    tokens   0 1 2 3 | 4 5 6 7 | 8 9           a row is closed by its last token
    rows        0    |    1    | open

A row is a mean of what its tokens have, weighted element by element by the softmax of their gates.
With overlap it takes in the tokens of the row before it, too, of which another series is read.
Source: DeepSeek-V4, 2026, as transformers 5.24 computes it (`DeepseekV4CSACompressor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class TokenRowForm:
    """Describes rows of one kind, and where a token has its part of them.

    Attributes:
        tokens: That a row stands for.
        overlap: Whether it takes in those of the row before it.
        dim: Numbers of a row.
        first: Column of a token's values; of each series behind the other, that of the row before
            first. Its gates lie behind them.
    """

    tokens: int
    overlap: bool
    dim: int
    first: int = 0

    @property
    def series(self) -> int:
        return 2 if self.overlap else 1

    @property
    def width(self) -> int:
        """Returns how many columns the values have; the gates have as many."""
        return self.series * self.dim


@dataclass(frozen=True, slots=True)
class NarrowRows:
    """Pages of vectors most of whose numbers take a byte, as those are that DeepSeek trains with:

        numbers that do not rotate, e4m3 | those that do, as they are | exponents

    All are views of the same pages.

    Attributes:
        numbers: [N, B, D - R] e4m3.
        rotated: [N, B, R] of a wider type.
        exponents: [N, B, S] uint8, of `narrow_form.NARROW_GROUP` numbers each: these are
            multiplied by two to the power of it minus 127. There may be more than are needed.
    """

    numbers: Tensor
    rotated: Tensor
    exponents: Tensor

    @property
    def shape(self) -> torch.Size:
        """Returns [N, B, D], as a tensor of vectors has it."""
        blocks, size, dim = self.numbers.shape
        return torch.Size((blocks, size, dim + self.rotated.shape[2]))


RowPages: TypeAlias = Tensor | NarrowRows
"""Names pages of vectors, [N, B, D]."""


@dataclass(frozen=True, slots=True)
class OpenTokens:
    """Holds what tokens of rows that are not closed yet have left for them, in pages.

    Attributes:
        pages: [N, B, W] float32.
        slot_mapping: [T] int64, where the step's tokens go; -1: nowhere.
        metadata: Of the step, with these pages' block tables.
    """

    pages: Tensor
    slot_mapping: Tensor
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class BackTurn:
    """Says by how much attended rows are rotated back: their last R numbers by minus the position.

    Attributes:
        positions: [T] int64.
        cos_sin_cache: [M, R] float32.
    """

    positions: Tensor
    cos_sin_cache: Tensor


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Closed rows that a step's tokens attend to beside the tokens of a window.

    Attributes:
        pages: A key that is the value, too.
        block_tables: [R, max_blocks] int32.
        tokens: That a row stands for: the token at position p sees the first (p + 1) // tokens.
        chosen: [T, K] int32, numbers of rows, ascending, -1 behind the last; None: all are seen.
    """

    pages: RowPages
    block_tables: Tensor
    tokens: int
    chosen: Tensor | None = None
