"""Embeddings of tokens that each layer reads by itself. Sources: Gemma 3n and Gemma 4 (Google, 2025
and 2026).

    ids ── table of all layers ─┐
                               (+)─ a part for each layer ─▶ its `LayerInput`
    embedded ─ projection ─ norm┘
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.linear import ReplicatedLinear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import UnnormedSum
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.vocabulary.embedding import VocabParallelEmbedding
from tandem_kernels import ops

_TABLE = "embed_tokens_per_layer"
_PROJECTION, _NORM = "per_layer_model_projection", "per_layer_projection_norm"
_GATE, _OUTPUT, _AFTER = (
    "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm",
)  # fmt: skip


class LayerInputs(nn.Module):
    """[T] token ids, and what they are embedded as, [T, H] -> [T, L, P]: a row for each layer. The
    table is split over ranks by its vocabulary, the projection whole on each.

    Args:
        size: P.
        is_short: The table lacks tokens that the model has, which read what its first one does.
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        size: int,
        hidden_size: int,
        eps: float,
        shard: Shard,
        *,
        is_short: bool = False,
    ) -> None:
        super().__init__()
        self.size, self.hidden_size = size, hidden_size
        self.most_tokens = vocab_size if is_short else None
        self.table = VocabParallelEmbedding(vocab_size, num_layers * size, shard.at(_TABLE))
        self.projection = ReplicatedLinear(hidden_size, num_layers * size, shard.at(_PROJECTION))
        self.norm = RMSNorm(size, eps, shard)

    def forward(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        if self.most_tokens is not None:
            input_ids = torch.where(input_ids < self.most_tokens, input_ids, 0)
        of_tokens: Tensor = self.table(input_ids) * self.size**0.5
        projected: Tensor = self.projection(embedded) * self.hidden_size**-0.5
        normed: Tensor = self.norm(projected.view(-1, self.size))
        return (
            (normed + of_tokens.view(-1, self.size))
            .mul_(2**-0.5)
            .view(len(input_ids), -1, self.size)
        )

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.table.checkpoint_weights(f"{prefix}.{_TABLE}")
        yield from self.projection.checkpoint_weights(f"{prefix}.{_PROJECTION}")
        yield from self.norm.checkpoint_weights(f"{prefix}.{_NORM}")


class LayerInput(nn.Module):
    """Adds to the stream the norm of what a layer makes of its own input, [T, P], which a gate of
    the stream lets through. Whole on every rank."""

    def __init__(self, size: int, hidden_size: int, eps: float, shard: Shard) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(hidden_size, size, shard.at(_GATE))
        self.output = ReplicatedLinear(size, hidden_size, shard.at(_OUTPUT))
        self.norm = RMSNorm(hidden_size, eps, shard)

    def forward(self, stream: ResidualStream, given: Tensor) -> None:
        gates = self.gate(stream.read(None))
        activated = ops.gelu_tanh_and_mul(torch.cat((gates, given), dim=1))
        stream.add(UnnormedSum(self.output(activated), self.norm.form))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate.checkpoint_weights(f"{prefix}.{_GATE}")
        yield from self.output.checkpoint_weights(f"{prefix}.{_OUTPUT}")
        yield from self.norm.checkpoint_weights(f"{prefix}.{_AFTER}")
