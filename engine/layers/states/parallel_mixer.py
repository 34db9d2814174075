"""Attention and a layer that keeps a state, side by side: both read the same norm of the residual
stream, and add what they find to it.

Source: Falcon-H1 (arXiv 2507.22448), as transformers' `modeling_falcon_h1` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from engine.layers.attention.block import AttentionBlock
from engine.layers.attention.layer import AttentionInputs
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight
from engine.layers.states.mamba import MambaMixer
from engine.layers.states.state_pages import StateInputs
from tandem_kernels.attention.index_pages import CachesByGroup


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """Holds what both are given in one step."""

    attention: AttentionInputs
    state: StateInputs

    @property
    def slot_mapping(self) -> Tensor:
        """Returns [T] int64; -1 marks padding."""
        return self.attention.slot_mapping


class ParallelMixer(nn.Module):
    """Adds both to the residual stream. Neither norms what it adds."""

    norm = None

    def __init__(self, attention: AttentionBlock, mixer: MambaMixer, state_name: str) -> None:
        """Takes the state's name in the checkpoint."""
        super().__init__()
        self.attention = attention
        self.mixer = mixer
        self.state_name = state_name

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: CachesByGroup, inputs: MixedInputs
    ) -> None:
        """Attends for the normed `x`, [T, H], and mixes it. `kv_cache` has pages of keys and
        values, then of states."""
        keys, states = kv_cache.caches
        assert isinstance(states, Tensor)
        self.mixer(x, stream, states, inputs.state)
        stream.read(None)
        self.attention(x, stream, keys, inputs.attention)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors; `prefix` is the layer's name."""
        yield from self.mixer.checkpoint_weights(f"{prefix}.{self.state_name}")
        yield from self.attention.checkpoint_weights(f"{prefix}.self_attn", is_fused=False)
