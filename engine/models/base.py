"""What the engine and a model say to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.layers.attention.backend import AttentionBackend
from tandem_kernels.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One pass of T tokens.

    Attributes:
        input_ids: [T] int32.
        positions: [T] int64.
        slot_mapping: [T] int64, block * B + offset; -1: nowhere.
        kv_caches: Of each layer, [N, 2, Hkv, B, D].
        metadata: The ragged batch, as `backend` made it.
        backend: Whose kernels attend.
        on_layer: Told the index of each layer when its keys and values are in the cache.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    kv_caches: list[Tensor]
    metadata: AttentionMetadata
    backend: AttentionBackend
    on_layer: Callable[[int], None]
