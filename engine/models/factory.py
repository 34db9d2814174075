"""One rank's model, built from its place and its device."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch

from engine.config import EngineConfig
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.shard import Shard
from engine.models.base import CausalLM
from engine.models.errors import CheckpointError
from engine.models.registry import MODELS, spec_of
from engine.parallel import ParallelPlace


def create_model(
    config: EngineConfig, place: ParallelPlace, device: torch.device | str
) -> CausalLM:
    """Returns one rank's share, allocated on `device`, not yet loaded.

    Raises:
        CheckpointError: So many ranks cannot share the model, or it cannot take drafts.
    """
    model, device = config.model, torch.device(device)
    spec = spec_of(model)
    spec.check_parallel(model, place.tp.size)
    if config.decode_query_len > 1 and any(group.is_state for group in config.kv_layout.groups):
        raise CheckpointError(
            model.path,
            "has layers that keep one state of all tokens, which a wrong draft would spoil",
            "choose decode_query_len 1",
        )
    dtype = getattr(torch, model.dtype)
    gemms = GemmPolicy.choose(config.device, device, place.tp.size, dtype)
    shard = Shard(place, dtype, device, gemms, model.quantization)
    module, _, name = MODELS[model.architecture].model.partition(":")
    created = getattr(import_module(module), name)(config, spec, shard)
    return cast(CausalLM, created.eval())
