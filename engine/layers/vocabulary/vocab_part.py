"""Logits that stay on the ranks that computed them, each of which has a part of the vocabulary.

To draw a token, each rank finds the best one of its own part, and ranks exchange two numbers a row:
the noisy logit and the token. Whatever else is wanted of logits is found in all of them, gathered.
Everything that is returned is the same bits on every rank. All ranks of the group call all of this
alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.parallel.distributed import ParallelGroup
from tandem_kernels import ops


@dataclass(frozen=True, slots=True)
class VocabCut:
    """How a vocabulary is cut, as one rank of `group` sees it.

    Attributes:
        start: The first token of its part, a multiple of 64.
        width: Columns of logits that each rank computes.
        num_filled: How many of them are of tokens here; at least one.
        vocab_size: Tokens of all parts, fewer than 2^24.
    """

    group: ParallelGroup
    start: int
    width: int
    num_filled: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class VocabPart:
    """This rank's part of the logits of S rows: `padded` [S, width] float32."""

    padded: Tensor
    cut: VocabCut

    @property
    def logits(self) -> Tensor:
        """Returns [S, v]: those of tokens `cut.start` and on, which may be changed."""
        return self.padded[:, : self.cut.num_filled]

    def whole(self) -> Tensor:
        """Gathers the logits of all tokens: [S, vocabulary]."""
        num_rows, vocab_size = len(self.padded), self.cut.vocab_size
        logits = self.cut.group.all_gather(self.padded)
        # A single row counts as contiguous whatever its stride; kernels are compiled by strides.
        return logits[:, :vocab_size].flatten().view(num_rows, vocab_size)

    def best(self, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Returns the tokens [S] that `ops.sample` would draw from all parts without filters."""
        group = self.cut.group
        found = ops.sample_part(self.logits, temperature, seeds, positions, self.cut.start)
        return ops.best_of_parts(group.gather_rows(found).view(group.size, *found.shape))
