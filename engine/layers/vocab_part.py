"""Logits that stay on the ranks that computed them, each of which has a part of the vocabulary.

Ranks look for what is wanted each in its own part, and exchange what they have found: a few numbers
a row, not all logits. Everything that is returned is the same bits on every rank.

    drawn tokens          the best (noisy logit, token) of each part
    log probabilities     the logits of the tokens asked for, the largest k of each part; then the
                          logarithm of the sum of each part's exponentials, and how many tokens of
                          it are likelier than the chosen one

All ranks of the group call all of this alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.distributed import ParallelGroup
from tandem_kernels import ops

_NO_TOKEN = 2.0**24
"""Fills lists of candidates that a part is too small for, behind all tokens."""


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

    def rows(self, index: Tensor) -> VocabPart:
        """Returns a copy of some rows."""
        return replace(self, padded=self.padded.index_select(0, index))

    def whole(self) -> Tensor:
        """Gathers the logits of all tokens: [S, vocabulary]."""
        num_rows, vocab_size = len(self.padded), self.cut.vocab_size
        logits = self.cut.group.all_gather(self.padded)
        # A single row counts as contiguous whatever its stride; kernels are compiled by strides.
        return logits[:, :vocab_size].flatten().view(num_rows, vocab_size)

    def best(self, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Returns the tokens [S] that `ops.sample` would draw from all parts without filters."""
        found = ops.sample_part(self.logits, temperature, seeds, positions, self.cut.start)
        return ops.best_of_parts(self._of_ranks(found))

    def topk_logprobs(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Does what `ops.topk_logprobs` would with all parts. Of equal logits the lower token comes
        first."""
        values, tokens = self._largest(k)
        own = self._logits_of(token_ids.unsqueeze(1))
        of_ranks = self._of_ranks(torch.cat((own, values, tokens), dim=1))
        chosen = of_ranks[:, :, 0].amax(dim=0)
        found = of_ranks.transpose(0, 1)
        values, tokens = _best_first(
            found[:, :, 1 : 1 + k].flatten(1), found[:, :, 1 + k :].flatten(1), k
        )
        log_sums, likelier = self._weighed(chosen)
        ids = torch.cat((token_ids.unsqueeze(1), tokens), dim=1)
        logprobs = torch.cat((chosen.unsqueeze(1), values), dim=1) - log_sums.unsqueeze(1)
        return ids, logprobs, likelier + 1

    def logprobs_of(self, token_ids: Tensor) -> Tensor:
        """Returns log probabilities of the tokens [S, N]."""
        found = self._of_ranks(self._logits_of(token_ids)).amax(dim=0)
        return found - self._weighed(found[:, 0])[0].unsqueeze(1)

    def _of_ranks(self, x: Tensor) -> Tensor:
        """Gathers [S, ...] of each rank: [R, S, ...]."""
        group = self.cut.group
        return group.gather_rows(x).view(group.size, *x.shape)

    def _logits_of(self, token_ids: Tensor) -> Tensor:
        """Returns the logits of tokens [S, N], -inf for those of other ranks."""
        local = token_ids - self.cut.start
        foreign = (local < 0) | (local >= self.cut.num_filled)
        found = self.padded.gather(1, local.masked_fill(foreign, 0))
        return found.masked_fill_(foreign, -torch.inf)

    def _largest(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the largest logits of this part and their tokens, both [S, k] float32."""
        values, local = self.logits.topk(min(k, self.cut.num_filled), dim=1)
        missing, tokens = k - values.shape[1], (local + self.cut.start).float()
        if missing:
            values = F.pad(values, (0, missing), value=-torch.inf)
            tokens = F.pad(tokens, (0, missing), value=_NO_TOKEN)
        return values, tokens

    def _weighed(self, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Returns of all parts the logarithm of the sum of exponentials, [S] float32, and how many
        tokens have logits above `thresholds` [S]: [S] int64."""
        log_sums, larger = self._of_ranks(ops.weigh_part(self.logits, thresholds)).unbind(2)
        return log_sums.logsumexp(dim=0), larger.sum(dim=0).long()


def _best_first(values: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest of `values` [S, N] with their tokens, int64, in order: by value, then
    by token."""
    tokens, order = tokens.sort(dim=1)
    values, by_value = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values[:, :k], tokens.gather(1, by_value)[:, :k].long()
