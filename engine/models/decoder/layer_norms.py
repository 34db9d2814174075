"""The norms of a decoder's layer, where its spec has them."""

from __future__ import annotations

from collections.abc import Iterator

from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.specs.dense import DenseSpec


def layer_norm(
    spec: DenseSpec, shard: Shard, name: str | None, eps: float | None = None
) -> RMSNorm | None:
    """Returns a norm, not yet loaded; without a `name` there is none."""
    if not name:
        return None
    return RMSNorm(spec.hidden_size, eps or spec.rms_norm_eps, shard, offset=spec.norm_offset)


def norm_weights(
    prefix: str, norms: tuple[tuple[RMSNorm | None, str | None], ...]
) -> Iterator[CheckpointWeight]:
    """Lists the checkpoint's tensors of norms, by their names."""
    for norm, name in norms:
        if norm is not None:
            yield from norm.checkpoint_weights(f"{prefix}.{name}")
