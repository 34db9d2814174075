"""Adapters as PEFT saves them, with random weights, and what a model is with one merged in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterShape:
    """Describes an adapter of the modules that have `within` in their names; its numbers follow
    from `seed`."""

    seed: int
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ALL
    config: dict[str, Any] = field(default_factory=dict)
    within: str = ""

    def scale(self, module: str) -> float:
        """Returns by what the product of the matrices is multiplied."""
        alpha = next(
            (a for name, a in self.config.get("alpha_pattern", {}).items() if name in module),
            self.alpha,
        )
        rank = self.rank_of(module)
        return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)

    def rank_of(self, module: str) -> int:
        patterns = self.config.get("rank_pattern", {})
        return next((r for name, r in patterns.items() if name in module), self.rank)


def write_adapter(folder: Path, model: Path, shape: AdapterShape) -> None:
    """Writes an adapter for the layers of the checkpoint in `model`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for module, (a, b) in _matrices(model, shape).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": list(shape.targets),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        **shape.config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_merged(folder: Path, model: Path, shape: AdapterShape) -> None:
    """Writes the checkpoint of `model` with the adapter added to its weights."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for module, (a, b) in _matrices(model, shape).items():
        delta = shape.scale(module) * (b.double() @ a.double())
        weight = weights[module + ".weight"]
        weights[module + ".weight"] = (weight.double() + delta).to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})


def _matrices(model: Path, shape: AdapterShape) -> dict[str, tuple[Tensor, Tensor]]:
    noise = torch.Generator().manual_seed(shape.seed)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, weight in sorted(_targets(load_file(model / "model.safetensors"), shape)):
        outputs, inputs = weight.shape
        rank = shape.rank_of(name)
        a = 0.3 * torch.randn(rank, inputs, generator=noise)
        found[name] = a, 0.3 * torch.randn(outputs, rank, generator=noise)
    return found


def _targets(weights: dict[str, Tensor], shape: AdapterShape) -> Iterable[tuple[str, Tensor]]:
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        is_target = module.rpartition(".")[2] in shape.targets and shape.within in name
        if is_target and module != name:
            yield module, weight
