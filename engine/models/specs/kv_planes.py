"""Says what layers with heads keep of a token, and which of them keep alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.config import Dtype, KVLayers, ModelConfig
from engine.head_sizes import HeadSizes
from kv_transfer.layout import attention_group
from kv_transfer.planes import Plane


def planes_of_heads(heads: HeadSizes, dtype: Dtype) -> tuple[Plane, ...]:
    """Returns the planes of keys and of values."""
    group = attention_group(
        layers=(),
        heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        dtype=dtype,
        block_size=1,
    )
    return group.planes


def layers_alike(
    model: ModelConfig, layers: Iterable[int], local: Collection[int], window: int | None
) -> tuple[KVLayers, ...]:
    """Returns groups of layers that cache alike; those in `local` have the window."""
    kinds: dict[tuple[int | None, tuple[Plane, ...]], list[int]] = {}
    for layer in sorted(layers, key=lambda layer: layer in local):
        planes = planes_of_heads(model.heads_of(layer), model.dtype)
        kinds.setdefault((window if layer in local else None, planes), []).append(layer)
    # A block has a page for each layer of the largest group, so groups are best of one size.
    whole = [len(alike) for (seen, _), alike in kinds.items() if seen is None]
    size = min(whole or map(len, kinds.values()))
    return tuple(
        KVLayers(layers=tuple(alike[start : start + size]), planes=planes, window=seen)
        for (seen, planes), alike in kinds.items()
        for start in range(0, len(alike), size)
    )
