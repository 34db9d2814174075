"""Makes one row of several tokens: the attention's own, and an indexer's keys of the same tokens.

    x ─ wkv, wgate ─ what a token leaves ─┬─ cache, until its row is closed
                                          └─ softmax of gates, sum ─ norm ─ rotate ─ row

Every rank has it whole. Source: DeepSeek-V4, 2026, as transformers 5.24 computes it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.attention.layer import AttentionInputs
from engine.layers.float32_sums import float32_sums
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops
from tandem_kernels.attention.token_rows import OpenTokens, TokenRowForm


class _RowWeights(nn.Module):
    """Holds what rows of one kind have beside the projections: [tokens, width] added to gates, and
    [dim] of the norm."""

    def __init__(self, form: TokenRowForm, shard: Shard) -> None:
        super().__init__()
        self.ape = shard.parameter(form.tokens, form.width, dtype=torch.float32)
        self.norm = shard.parameter(form.dim, dtype=torch.float32)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield CheckpointWeight(f"{prefix}.ape", self.ape, tuple(self.ape.shape))
        yield CheckpointWeight(f"{prefix}.norm.weight", self.norm, tuple(self.norm.shape))


class RowCompressor(nn.Module):
    """Closes rows of each of `forms`, which lie behind each other in what a token leaves.

    Args:
        forms: Of rows of the same tokens, with the names of their modules in the checkpoint.
    """

    def __init__(
        self,
        hidden_size: int,
        forms: tuple[tuple[str, TokenRowForm], ...],
        eps: float,
        shard: Shard,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.gemms = hidden_size, eps, shard.gemms
        self.names = tuple(name for name, _ in forms)
        self.forms = tuple(form for _, form in forms)
        width = sum(2 * form.width for form in self.forms)
        self.weight = shard.parameter(width, hidden_size)
        self.rows = [_RowWeights(form, shard) for form in self.forms]
        self.weights_of_rows = nn.ModuleList(self.rows)

    def left(self, x: Tensor) -> Tensor:
        """Returns what tokens leave for their rows: [T, hidden] -> [T, W] float32."""
        sums = float32_sums(x, self.weight, self.gemms)
        return F.linear(x.float(), self.weight.float()) if sums is None else sums

    def forward(self, x: Tensor, open_tokens: OpenTokens, inputs: AttentionInputs) -> list[Tensor]:
        """Returns the rows of each kind that tokens of `x` [T, hidden] close, [T, dim] float32, and
        writes what others leave into the cache."""
        left = self.left(x)
        rows = [
            ops.close_rows(
                left, open_tokens, form, own.ape, own.norm, inputs.positions,
                inputs.cos_sin_cache, self.eps,
            )
            for form, own in zip(self.forms, self.rows, strict=True)
        ]  # fmt: skip
        ops.keep_open_tokens(left, open_tokens)
        return rows

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors; `prefix` is the attention's name."""
        for name, form, own in zip(self.names, self.forms, self.rows, strict=True):
            for column, part in enumerate(("wkv", "wgate")):
                first = form.first + column * form.width
                weight = self.weight[first : first + form.width]
                yield CheckpointWeight(
                    f"{prefix}.{name}.{part}.weight", weight, (form.width, self.hidden_size)
                )
            yield from own.checkpoint_weights(f"{prefix}.{name}")
