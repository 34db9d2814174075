"""Writes floats in small groups as compressed-tensors, ModelOpt, Quark and MiniMax publish them:
NVFP4, MXFP4 and MXFP8. What they mean is computed from the formats' definitions, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.engine.models.quantised_checkpoints import (
    Stored,
    Writer,
    compressed_tensors,
    to_e4m3,
    write_fp8_tensors,
)
from tests.engine.models.quark_checkpoints import quark_config, quark_layers, quark_numbers

_CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def _packed(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bytes of [N, K] rounded to e2m1, and what they mean in float64."""
    codes = (scaled.double()[..., None] - _CODES).abs().argmin(-1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).byte(), _CODES[codes]


def write_nvfp4(
    layout: str = "modelopt",
    *,
    group: int = 16,
    smoothed: bool = False,
    has_inputs: bool = True,
    input_scale: str = "input_scale",
) -> Writer:
    """Returns the writer of a layout; `has_inputs`: activations have scales, too, of this name."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        by_group = weight.view(len(weight), -1, group)
        # Powers of two, so that a division by the inverse is exact.
        factor = torch.exp2((weight.abs().max() / 6 / 448).log2().ceil())
        scales = to_e4m3(by_group.abs().amax(2) / 6 / factor)
        wide = (scales.double() * factor.double()).repeat_interleave(group, 1)
        packed, numbers = _packed(torch.where(wide > 0, weight / wide, 0))
        meaning = numbers * wide
        if layout == "modelopt":
            stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor}
            inputs = {input_scale: torch.tensor(0.02)}
        else:
            divisor = (1 / factor).reshape(1)
            stored = {"weight_packed": packed, "weight_scale": scales}
            stored |= {"weight_global_scale": divisor}
            inputs = {"input_global_scale": torch.tensor([300.0])}
        # As ModelOpt does, only where no norm in front can do it.
        if smoothed and layer.endswith(("o_proj", "down_proj", "w2")):
            smoothing = 2.0 ** torch.randint(-2, 3, (weight.shape[1],)).float()
            stored["pre_quant_scale"] = smoothing
            meaning = meaning * smoothing
        stored |= inputs if has_inputs else {}
        return {f"{layer}.{name}": tensor for name, tensor in stored.items()}, meaning.float()

    return write


def _exponents(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Returns e8m0 of each 32 inputs, and its power of two for each input, in float64."""
    most = weight.view(len(weight), -1, 32).abs().amax(2).clamp(min=1e-12)
    exponents = (most / largest).log2().ceil().clamp(-127, 127)
    return (exponents + 127).byte(), exponents.double().exp2().repeat_interleave(32, 1)


def write_mxfp4(name: str = "weight") -> Writer:
    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        exponents, wide = _exponents(weight, 6.0)
        packed, numbers = _packed(weight / wide)
        stored = {f"{layer}.{name}": packed, f"{layer}.weight_scale": exponents}
        return stored, (numbers * wide).float()

    return write


def write_mxfp8(scale_name: str = "weight_scale", *, is_typed: bool = False) -> Writer:
    """Returns the writer of MXFP8; `is_typed`: exponents are stored as such, and not as bytes."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        exponents, wide = _exponents(weight, 448.0)
        numbers = to_e4m3((weight / wide).float())
        scales = exponents.view(torch.float8_e8m0fnu) if is_typed else exponents
        stored = {f"{layer}.weight": numbers, f"{layer}.{scale_name}": scales}
        return stored, (numbers.double() * wide).float()

    return write


def ct_floats(form: str, inputs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns what llm-compressor 0.14 writes of a scheme."""
    bits = 8 if form == "mxfp8-quantized" else 4
    is_nvfp4 = form == "nvfp4-pack-quantized"
    weights = {
        "num_bits": bits,
        "strategy": "tensor_group" if is_nvfp4 else "group",
        "group_size": 16 if is_nvfp4 else 32,
        "observer": "memoryless_minmax",
        "scale_dtype": "torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8",
        "zp_dtype": None,
    }
    config = compressed_tensors(weights | changes, format=form)
    group = config["config_groups"]["group_0"]
    group["format"] = form
    group["input_activations"] = inputs
    return config


def fp_inputs(bits: int, group: int) -> dict[str, Any]:
    """Returns what llm-compressor writes of inputs."""
    is_nvfp4 = group == 16
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "dynamic": "local" if is_nvfp4 else True,
        "group_size": group,
        "strategy": "tensor_group" if is_nvfp4 else "group",
        "scale_dtype": "torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8",
        "zp_dtype": None,
        "observer": "static_minmax" if is_nvfp4 else None,
        "observer_kwargs": {},
        "block_structure": None,
        "actorder": None,
    }


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "model.embed_tokens", "model.layers.*.mlp.gate"],
        "producer": {"name": "modelopt", "version": "0.47.0"},
        **changes,
    }


def quark(**changes: Any) -> dict[str, Any]:
    """Returns what Quark writes of MXFP4."""
    return quark_config(quark_layers(QUARK_MXFP4, QUARK_MXFP4 | {"is_dynamic": True}), **changes)


QUARK_MXFP4 = quark_numbers(
    "fp4", "per_group", group_size=32, symmetric=None, scale_format="e8m0", ch_axis=-1
)
QUARK_NVFP4 = [
    QUARK_MXFP4 | {"group_size": 16, "scale_format": "float32", "scale_type": "float32"},
    quark_numbers("fp8_e4m3", "per_tensor", is_scale_quant=True, scale_type="float32"),
]
"""Quark says of NVFP4 how numbers are quantised, and how their scales are."""


_MXFP8 = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [1, 32],
    "ignored_layers": ["lm_head"],
}

LAYOUTS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "nvfp4": (write_nvfp4(), modelopt("NVFP4")),
    "w4a16_nvfp4": (write_nvfp4(has_inputs=False), modelopt("W4A16_NVFP4")),
    "nvfp4_awq": (write_nvfp4(smoothed=True), modelopt("NVFP4_AWQ")),
    "w4a8_nvfp4_fp8": (write_nvfp4(group=32), modelopt("W4A8_NVFP4_FP8")),
    "ct nvfp4": (
        write_nvfp4("compressed-tensors"),
        ct_floats("nvfp4-pack-quantized", fp_inputs(4, 16)),
    ),
    "ct nvfp4a16": (
        write_nvfp4("compressed-tensors", has_inputs=False),
        ct_floats("nvfp4-pack-quantized"),
    ),
    "ct mxfp4": (
        write_mxfp4("weight_packed"),
        ct_floats("mxfp4-pack-quantized", fp_inputs(4, 32)),
    ),
    "modelopt mxfp4": (write_mxfp4(), modelopt("mxfp4")),
    "quark": (write_mxfp4(), quark()),
    "quark nvfp4": (
        write_nvfp4(input_scale="input_scale_2"),
        quark_config(quark_layers(QUARK_NVFP4, QUARK_NVFP4)),
    ),
    "ct mxfp8": (write_mxfp8(), ct_floats("mxfp8-quantized", fp_inputs(8, 32))),
    "modelopt mxfp8": (write_mxfp8(is_typed=True), modelopt("MXFP8")),
    "mxfp8": (write_mxfp8("weight_scale_inv"), _MXFP8),
}


def write_mixed(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Writes what `mixed` says: feed-forward layers in NVFP4, attention's in FP8."""
    write = write_fp8_tensors if "self_attn" in layer else write_nvfp4()
    return write(layer, weight)


def mixed(num_layers: int) -> dict[str, Any]:
    """Returns ModelOpt's MIXED_PRECISION for `write_mixed`."""
    layers: dict[str, dict[str, Any]] = {}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layers[f"{prefix}.self_attn.{name}"] = {"quant_algo": "FP8"}
        for name in ("gate_proj", "up_proj", "down_proj"):
            nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
            layers[f"{prefix}.mlp.{name}"] = nvfp4
            layers[f"{prefix}.mlp.experts.7.{name}"] = nvfp4
    return modelopt(
        "MIXED_PRECISION", quantized_layers=layers, kv_cache_scheme={"num_bits": 8, "type": "float"}
    )
