"""The choice of the method of a layer's experts."""

from __future__ import annotations

from engine.layers.expert_methods.base import ExpertMethod
from engine.layers.expert_methods.plain import PlainExperts
from engine.layers.shard import Shard


def expert_method(shard: Shard) -> ExpertMethod:
    """Returns the method for experts on this rank."""
    return PlainExperts()
