"""Token embedding and language-model head, the vocabulary split over ranks.

The vocabulary is padded so that every rank holds the same number of rows, a multiple of 64
(which GEMMs like). Padding rows are zero and are cut from the logits. Source: Shoeybi et al.,
Megatron-LM (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.float32_sums import float32_sums
from engine.layers.methods.base import LinearPart
from engine.layers.methods.formats.weight_format import WeightFormat, matrix_weight
from engine.layers.methods.registry import format_of
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.vocabulary.vocab_part import VocabCut, VocabPart
from tandem_kernels import ops

_ROWS_MULTIPLE = 64


class VocabParallelEmbedding(nn.Module):
    """[T] int64 token ids -> [T, H]. Rank r holds rows [start, start + rows) of the padded table.

    Args:
        weight: Another table's rows to share; None: its own.
    """

    form: WeightFormat | None = None

    def __init__(
        self, vocab_size: int, hidden_size: int, shard: Shard, weight: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.group = shard.tp
        self.shape = (vocab_size, hidden_size)
        self.gemms = shard.gemms
        unit = _ROWS_MULTIPLE * shard.tp.size
        self.start, self.num_rows = shard.part(-(-vocab_size // unit) * unit)
        self.num_filled = max(0, min(self.num_rows, vocab_size - self.start))
        self.weight = shard.parameter(self.num_rows, hidden_size) if weight is None else weight
        self.weight[self.num_filled :].zero_()

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return ops.embedding(input_ids, self.weight)
        return self.group.all_reduce(ops.embedding(input_ids, self.weight, self.start))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        rows = self.weight[: self.num_filled]
        start = min(self.start, self.shape[0])
        yield matrix_weight(self.form, rows, LinearPart(prefix, self.shape, 0, start))


class LMHead(VocabParallelEmbedding):
    """[S, H] -> float32 logits [S, vocabulary], whole on every rank. Computed with plain weights,
    however the checkpoint has them.

    Args:
        scale: Of the logits.
        softcap: What their absolute value stays below; 0: nothing.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        shard: Shard,
        weight: nn.Parameter | None = None,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        super().__init__(vocab_size, hidden_size, shard, weight)
        self.scale, self.softcap = scale, softcap
        self.form = format_of(shard.scheme(), shard.prefix)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.part(hidden).whole()

    @property
    def cut(self) -> VocabCut:
        """Returns how the vocabulary is cut."""
        return VocabCut(self.group, self.start, self.num_rows, self.num_filled, self.shape[0])

    @property
    def may_stay_split(self) -> bool:
        """Returns whether parts may be sampled from: every rank has tokens. Not in deterministic
        mode, where it must not count how the vocabulary is cut."""
        filled_by_others = (self.group.size - 1) * self.num_rows
        return 0 < filled_by_others < self.shape[0] and not self.gemms.deterministic

    def part(self, hidden: Tensor) -> VocabPart:
        """Computes this rank's part [S, v], float32, of the logits of `hidden` [S, H]."""
        return VocabPart(self._local_logits(hidden), self.cut)

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """Computes this rank's logits in float32."""
        logits = self._product(hidden)
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.softcap:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def _product(self, hidden: Tensor) -> Tensor:
        sums = float32_sums(hidden, self.weight, self.gemms)
        return F.linear(hidden, self.weight).float() if sums is None else sums
