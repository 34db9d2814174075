"""Rewrites plain checkpoints in the layouts that quantised ones are published in.

Every writer stores its numbers and returns what they mean: plain weights in float32, computed here
by arithmetic of its own, so that a checkpoint of these is the oracle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
Writer = Callable[[str, Tensor], tuple[Stored, Tensor]]
"""Is given a layer's name and its weight; returns what is stored and what it means."""


def quantise_checkpoint(
    folder: Path,
    quantised: Path,
    plain: Path,
    writer: Writer,
    config: dict[str, Any],
    leave: tuple[str, ...] = ("mlp.gate.", "router", "weights_proj"),
) -> None:
    """Writes two checkpoints: `folder` quantised, and with plain weights that mean the same.

    Args:
        config: `quantization_config`.
        leave: Parts of names of projections that stay plain.
    """
    stored: Stored = {}
    meant: Stored = {}
    files = sorted(folder.glob("*.safetensors"))
    for name, weight in (item for file in files for item in load_file(file).items()):
        layer = name.removesuffix(".weight")
        if not _is_projection(layer) or any(part in name for part in leave):
            stored[name] = meant[name] = weight
            continue
        tensors, meaning = writer(layer, weight)
        stored |= tensors
        meant[name] = meaning
    for to, tensors in ((quantised, stored), (plain, meant)):
        shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: t.contiguous() for name, t in tensors.items()}, to / "model.safetensors")
    path = quantised / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def _is_projection(layer: str) -> bool:
    last = layer.rpartition(".")[2]
    return (
        last.endswith("_proj") or "_proj_with" in last or last in ("w1", "w2", "w3", "wk", "wq_b")
    )


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def write_fp8_blocks(block: tuple[int, int], scale_name: str = "weight_scale_inv") -> Writer:
    """Returns the writer of DeepSeek's layout."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = block
        numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        meaning = torch.empty(weight.shape)
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = (
                    slice(i * rows, (i + 1) * rows),
                    slice(j * columns, (j + 1) * columns),
                )
                scales[i, j] = weight[at].abs().max() / 448
                numbers[at] = to_e4m3(weight[at] / scales[i, j])
                meaning[at] = numbers[at].float() * scales[i, j]
        return {f"{layer}.weight": numbers, f"{layer}.{scale_name}": scales}, meaning

    return write


def write_fp8_channels(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Writes the layout of compressed-tensors: a scale for each output, [N, 1]."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 448
    numbers = to_e4m3(weight / scales)
    return {
        f"{layer}.weight": numbers,
        f"{layer}.weight_scale": scales.to(torch.bfloat16),
    }, numbers.float() * scales.to(torch.bfloat16).float()


def write_fp8_tensors(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Writes the layout of ModelOpt: one scale for weights, one for activations."""
    scale = weight.abs().max() / 448
    numbers = to_e4m3(weight / scale)
    return {
        f"{layer}.weight": numbers,
        f"{layer}.weight_scale": scale,
        f"{layer}.input_scale": torch.tensor(0.031),
    }, numbers.float() * scale


def write_fp8_as_transformers(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Writes the same by the names of transformers, as Ministral 3 is published."""
    stored, meaning = write_fp8_tensors(layer, weight)
    others = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    endings = [(name.rpartition(".")[2], tensor) for name, tensor in stored.items()]
    return {f"{layer}.{others.get(end, end)}": tensor for end, tensor in endings}, meaning


FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
FP8_TENSORS = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    "producer": {"name": "modelopt", "version": "0.29.0"},
}


def compressed_tensors(weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns the config of FP8 weights with dynamic activations."""
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "dynamic": False,
            "group_size": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
            "actorder": None,
            **weights,
        },
        "input_activations": {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "dynamic": True,
            "strategy": "token",
            "group_size": None,
            "block_structure": None,
            "observer": None,
            "observer_kwargs": {},
            "actorder": None,
        },
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1.4,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
        **changes,
    }
