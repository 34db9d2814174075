"""The projections of latent attention's input."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.layers.linear import MergedColumnParallelLinear
from engine.layers.methods.base import ColumnPart
from engine.layers.rows import RowForm, Rows
from engine.layers.shard import CheckpointWeight, Shard


class LatentInputProjection(nn.Module):
    """[T, hidden] -> (queries or what they are made of [T, queries.count], latents with their keys
    [T, L + R]). Source: DeepSeek-V2 (arXiv 2405.04434), 2.1.

    Both are one GEMM, unless their weights are quantised differently.

    Args:
        queries, latents: Outputs of the two projections.
        names: Of the two in the checkpoint.
    """

    def __init__(
        self,
        hidden_size: int,
        queries: ColumnPart,
        latents: ColumnPart,
        names: tuple[str, str],
        shard: Shard,
    ) -> None:
        super().__init__()
        self.names = names
        self.num_queries = queries.count
        self.merged: MergedColumnParallelLinear | None = None
        self.apart: nn.ModuleList | None = None
        if shard.scheme(names[0]) == shard.scheme(names[1]):
            parts = queries, latents
            self.merged = MergedColumnParallelLinear(hidden_size, parts, shard, names=names)
        else:
            self.apart = nn.ModuleList(
                MergedColumnParallelLinear(hidden_size, (part,), shard.at(name))
                for part, name in zip((queries, latents), names, strict=True)
            )

    @property
    def input_form(self) -> RowForm | None:
        """Returns how inputs are best given; see `LinearMethod`."""
        return None if self.merged is None else self.merged.input_form

    def forward(self, x: Rows) -> tuple[Tensor, Tensor]:
        if self.apart is not None:
            queries, latents = self.apart
            return queries(x), latents(x)
        assert self.merged is not None
        both = self.merged(x)
        return both[:, : self.num_queries], both[:, self.num_queries :]

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        names = [f"{prefix}.{name}" for name in self.names]
        if self.merged is not None:
            yield from self.merged.checkpoint_weights(*names)
            return
        assert self.apart is not None
        for layer, name in zip(self.apart, names, strict=True):
            assert isinstance(layer, MergedColumnParallelLinear)
            yield from layer.checkpoint_weights(name)
