"""Experts whose checkpoint is in MXFP4, and which compute in the model's own dtype."""

from __future__ import annotations

from collections.abc import Iterator

from engine.layers.expert_methods.base import ExpertLayer
from engine.layers.expert_methods.plain import PlainExperts
from engine.layers.expert_methods.stacked import check_whole_blocks, mxfp4_weights
from engine.layers.shard import CheckpointWeight


class DequantisedMxfp4Experts(PlainExperts):
    """Reads slice by slice: at most one expert is there in both forms."""

    def stacked_weights(self, layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
        check_whole_blocks(layer, prefix)
        return mxfp4_weights(layer, prefix)
