"""From an architecture's name to the model."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.distributed import TensorParallelGroup
from engine.layers.shard import Shard
from engine.models.checkpoint import check_tensor_parallel
from engine.models.errors import CheckpointError
from engine.models.llama import LlamaForCausalLM
from tandem_kernels.device import has_warpgroup_products, overlaps_launches

_NARROW_ROWS = 16
"""With more rows, or on older devices, the library is the faster one."""
_GATED_ROWS = 1024
"""With fewer, too few tiles for all SMs."""
_RESIDUAL_ROWS = 1024
"""With fewer, small kernels take little of a step."""

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
}


def create_model(
    config: EngineConfig, tp: TensorParallelGroup, device: torch.device | str
) -> LlamaForCausalLM:
    """One rank's share, allocated on `device`, not yet loaded.

    Raises:
        CheckpointError: Unknown architecture, or one that this many ranks cannot share.
    """
    model = config.model
    if model.architecture not in MODELS:
        raise CheckpointError(
            model.path,
            f"has architecture {model.architecture}, which tandem does not have",
            f"use one of {', '.join(MODELS)}",
        )
    check_tensor_parallel(model, tp.size)
    device = torch.device(device)
    deterministic, allows = config.device.deterministic, config.device.allows
    narrow = allows("narrow-products") and overlaps_launches(device) and not deterministic
    gates = allows("gated-products") and has_warpgroup_products(device) and not deterministic
    adds = (
        allows("residual-products") and device.type == "cuda" and tp.size == 1 and not deterministic
    )
    shard = Shard(
        tp,
        getattr(torch, model.dtype),
        device,
        deterministic,
        _NARROW_ROWS if narrow else 0,
        _GATED_ROWS if gates else 0,
        _RESIDUAL_ROWS if adds else 0,
    )
    return MODELS[model.architecture](config, shard).eval()
