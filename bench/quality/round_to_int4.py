"""Makes a 4-bit checkpoint of a plain one by rounding to the nearest, the least quantisers do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP_SIZE = 32
_LARGEST = 7


def write_int4(plain: Path, folder: Path) -> None:
    """Writes `folder`, as compressed-tensors packs numbers: one scale for `GROUP_SIZE` inputs of an
    output, no zero points. Embedding, head and norms stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in plain.glob("*.json"):
        shutil.copy(path, folder)
    tensors: dict[str, Tensor] = {}
    for path in plain.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if tensor.dim() == 2 and name.endswith("proj.weight"):
                tensors |= _packed(name.removesuffix(".weight"), tensor)
            else:
                tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**weights, "group_size": GROUP_SIZE}}
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def _packed(layer: str, weight: Tensor) -> dict[str, Tensor]:
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, GROUP_SIZE)
    scales = (groups.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=1e-8).to(weight.dtype)
    numbers = (groups / scales.float()).round().clamp(-8, _LARGEST).to(torch.int64) + 8
    eights = numbers.view(outputs, inputs // 8, 8)
    words = (eights << (4 * torch.arange(8))).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return {
        f"{layer}.weight_packed": signed.to(torch.int32),
        f"{layer}.weight_scale": scales.view(outputs, -1),
        f"{layer}.weight_shape": torch.tensor([outputs, inputs]),
    }
