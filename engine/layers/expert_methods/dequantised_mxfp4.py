"""Experts whose checkpoint is in MXFP4, and which compute in the model's own dtype."""

from __future__ import annotations

from collections.abc import Iterator

from engine.layers.expert_methods.base import ExpertLayer
from engine.layers.expert_methods.plain import PlainExperts
from engine.layers.expert_methods.stacked import mxfp4_weights
from engine.layers.methods.registry import UnsupportedScheme
from engine.layers.shard import CheckpointWeight
from tandem_kernels.reference.mxfp4 import BLOCK


class DequantisedMxfp4Experts(PlainExperts):
    """Reads slice by slice: at most one expert is there in both forms."""

    def stacked_weights(self, layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
        for size in (layer.sizes.hidden, layer.sizes.whole):
            if size % BLOCK:
                raise UnsupportedScheme(
                    f"{prefix} is quantised as MXFP4, but {size} inputs are no whole blocks of "
                    f"{BLOCK}: use another checkpoint of the model"
                )
        return mxfp4_weights(layer, prefix)
