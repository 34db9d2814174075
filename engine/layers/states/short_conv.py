"""A gated short convolution: a request keeps its last inputs, whatever its length.

    x ─┬─ b ─(×)─ convolve with the last inputs ─(×)─ o ─(+)
       ├─ x ──┘                                   │
       └─ c ──────────────────────────────────────┘

A block of the cache holds the last inputs of a request in a layer. Channels are split over ranks.
Source: LFM2 technical report (arXiv 2511.23404), as transformers' `modeling_lfm2` has it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.base import ColumnPart
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.states.state_pages import StateInputs, last_inputs_of_pages
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import KeptInputs


class ShortConv(nn.Module):
    """Adds a gated short convolution to the residual stream.

    Args:
        kernel: Inputs that each channel is convolved over, its own included.
        norm: Of what is added; None: none.
        drafting: Rows, and tokens of a decode at most, in an engine that drafts.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel: int,
        shard: Shard,
        *,
        norm: RMSNorm | None = None,
        drafting: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.kernel = hidden_size, kernel
        self.norm = norm
        self.first, self.channels = shard.part(hidden_size)
        part = ColumnPart(self.first, self.channels, hidden_size)
        self.in_proj = MergedColumnParallelLinear(
            hidden_size, (part, part, part), shard, names=("in_proj",)
        )
        self.conv_weight = shard.parameter(self.channels, kernel)
        self.o_proj = RowParallelLinear(hidden_size, hidden_size, shard.at("out_proj"))
        self.kept: KeptInputs | None = None
        if drafting is not None:
            self.kept = KeptInputs.allocate(*drafting, self.channels, 0, self.conv_weight)

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: Tensor, inputs: StateInputs
    ) -> None:
        """Convolves the normed `x`: [T, H]; `kv_cache`: [N, bytes of a page] uint8."""
        metadata, kept = inputs.metadata, self.kept
        before, after, taken = self.in_proj(x).chunk(3, dim=1)
        convolved = ops.causal_conv(
            before * taken,
            self.conv_weight,
            self.views(kv_cache, x.dtype),
            metadata,
            activates=False,
            kept=None if kept is None else kept.convolved,
        )
        self.o_proj.add_to(stream, after * metadata.rows_of_step(convolved), self.norm)

    def views(self, kv_cache: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the last inputs in the pages, [N, channels, kernel - 1]."""
        return last_inputs_of_pages(kv_cache, dtype, (self.channels, self.kernel - 1))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors."""
        yield from self.in_proj.checkpoint_weights(f"{prefix}.in_proj")
        shape = (self.hidden_size, 1, self.kernel)
        target = self.conv_weight.unsqueeze(1)
        yield CheckpointWeight(f"{prefix}.conv.weight", target, shape, 0, self.first)
        yield from self.o_proj.checkpoint_weights(f"{prefix}.out_proj")
