"""Writes integer weights that are not packed to 4 bits: int8 as compressed-tensors, GPTQ, AutoRound
and ModelOpt publish it, and int4 that is meant for inputs of 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.models.int4_checkpoints import auto_round, gptq, input_order, pack
from tests.engine.models.quantised_checkpoints import (
    Stored,
    Writer,
    compressed_tensors,
    quantise_checkpoint,
)
from tests.engine.models.quark_checkpoints import quark_config, quark_layers, quark_numbers

Pair = tuple[Path, Path]
MakePair = Callable[[str, str], Pair]
"""Is given a family and a layout."""

INT8_INPUTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "dynamic": True,
    "strategy": "token",
    "group_size": None,
    "block_structure": None,
    "observer": None,
    "observer_kwargs": {},
    "actorder": None,
}


def quantised(
    weight: Tensor,
    group_size: int,
    *,
    symmetric: bool = True,
    bits: int = 8,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (numbers [out, in], scales [out, groups] bfloat16, zeros [out, groups], the group of
    each input, the meaning), where numbers and zeros are signed. `group_size` 0: one scale for
    all."""
    top = 2 ** (bits - 1)
    num_inputs = weight.shape[1]
    size = group_size if group_size > 0 else num_inputs
    place = torch.arange(num_inputs) if order is None else order.argsort()
    group_of = place // size
    numbers = torch.empty(weight.shape, dtype=torch.int64)
    meaning = torch.empty(weight.shape)
    num_groups = -(-num_inputs // size)
    scales = torch.empty(len(weight), num_groups, dtype=torch.bfloat16)
    zeros = torch.zeros(len(weight), num_groups, dtype=torch.int64)
    for group in range(num_groups):
        own = weight[:, group_of == group]
        if symmetric:
            largest = own.abs().max() if group_size == 0 else own.abs().amax(1)
            scales[:, group] = largest / (top - 1)
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / (2 * top - 1)
            zero = (-low / scales[:, group].float()).round() - top
            zeros[:, group] = zero.clamp(-top + 1, top - 1).long()
        scale, zero = scales[:, group, None].float(), zeros[:, group, None]
        rounded = ((own / scale).round() + zero).clamp(-top, top - 1).long()
        numbers[:, group_of == group] = rounded
        meaning[:, group_of == group] = (rounded - zero).float() * scale
    return numbers, scales, zeros, group_of.int(), meaning


def write_plain_int(
    group_size: int = -1, *, symmetric: bool = True, bits: int = 8, static: bool = False
) -> Writer:
    """Returns the writer of `int-quantized`: a byte for each number."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        numbers, scales, zeros, _, meaning = quantised(
            weight, group_size, symmetric=symmetric, bits=bits
        )
        stored = {f"{layer}.weight": numbers.to(torch.int8), f"{layer}.weight_scale": scales}
        if group_size == 0:
            stored[f"{layer}.weight_scale"] = scales[:1, 0]
        if not symmetric:
            stored[f"{layer}.weight_zero_point"] = zeros.to(torch.int8)
        if static:
            stored[f"{layer}.input_scale"] = torch.tensor([0.02])
            stored[f"{layer}.input_zero_point"] = torch.zeros(1, dtype=torch.int8)
        return stored, meaning

    return write


def write_quark(group_size: int = -1, *, static: bool = False) -> Writer:
    """Returns the writer of Quark's INT8, which has as many scales as outputs, and zeros."""
    write_plain = write_plain_int(group_size, static=static)

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        stored, meaning = write_plain(layer, weight)
        scales = stored[f"{layer}.weight_scale"].flatten()
        stored[f"{layer}.weight_scale"] = scales
        stored[f"{layer}.weight_zero_point"] = torch.zeros_like(scales, dtype=torch.int8)
        return stored, meaning

    return write


def write_packed_int8(group_size: int, *, symmetric: bool = True) -> Writer:
    """Returns the writer of `pack-quantized`, whose words hold numbers from 0 on."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        numbers, scales, zeros, _, meaning = quantised(weight, group_size, symmetric=symmetric)
        stored = {
            f"{layer}.weight_packed": pack(numbers + 128, 1, bits=8, nibbles=(0, 1, 2, 3)),
            f"{layer}.weight_scale": scales,
            f"{layer}.weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored[f"{layer}.weight_zero_point"] = pack(zeros + 128, 0, bits=8)
        return stored, meaning

    return write


def write_gptq_int8(
    group_size: int, *, symmetric: bool = True, ordered: bool = False, stored_less: int = 1
) -> Writer:
    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        order = input_order(weight.shape[1]) if ordered else None
        numbers, scales, zeros, group_of, meaning = quantised(
            weight, group_size, symmetric=symmetric, order=order
        )
        return {
            f"{layer}.qweight": pack((numbers + 128).t(), 0, bits=8),
            f"{layer}.qzeros": pack((zeros.t() + 128 - stored_less) % 256, 1, bits=8),
            f"{layer}.scales": scales.t(),
            f"{layer}.g_idx": group_of,
        }, meaning

    return write


def _smoothing(layer: str, num_inputs: int) -> Tensor | None:
    """Returns the factors of inputs where a layer has some: those behind no norm."""
    if not layer.endswith(("o_proj", "down_proj")):
        return None
    return 0.5 + torch.rand(num_inputs, generator=torch.Generator().manual_seed(num_inputs))


def write_modelopt(group_size: int, bits: int) -> Writer:
    """Returns the writer of ModelOpt's W8A8_SQ_PER_CHANNEL and of its AWQ, two outputs a byte."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        factors = _smoothing(layer, weight.shape[1])
        smooth = weight if factors is None else weight / factors
        numbers, scales, _, _, meaning = quantised(smooth, group_size, bits=bits)
        stored = {f"{layer}.input_scale": torch.tensor(0.02)}
        if bits == 8:
            stored |= {
                f"{layer}.weight": numbers.to(torch.int8),
                f"{layer}.weight_scale": scales.float().view(-1),
            }
        else:
            low, high = (numbers[start::2] & 15 for start in (0, 1))
            stored |= {
                f"{layer}.weight": (low | high << 4).to(torch.uint8),
                f"{layer}.weight_scale": scales.float(),
                f"{layer}.weight_scale_2": torch.tensor(0.01),
            }
        if factors is None:
            return stored, meaning
        return stored | {f"{layer}.pre_quant_scale": factors}, meaning * factors

    return write


def ct_int(
    group_size: int = -1, *, inputs: dict[str, Any] | None = None, form: str = "", **weights: Any
) -> dict[str, Any]:
    """Returns a config of compressed-tensors; with `inputs` their quantisation."""
    strategy = "group" if group_size > 0 else "channel" if group_size else "tensor"
    of_weights = {
        "num_bits": 8,
        "type": "int",
        "strategy": strategy,
        "group_size": group_size if group_size > 0 else None,
        **weights,
    }
    form = form or ("pack-quantized" if inputs is None else "int-quantized")
    config = compressed_tensors(of_weights, format=form)
    config["config_groups"]["group_0"]["input_activations"] = inputs
    return config


def quark_int8(
    *, qscheme: str = "per_channel", is_dynamic: bool = True, inputs: bool = True, **changes: Any
) -> dict[str, Any]:
    """Returns what Quark writes of INT8. `changes`: of inputs."""
    given = quark_numbers("int8", "per_tensor", is_dynamic=is_dynamic) | changes
    return quark_config(quark_layers(quark_numbers("int8", qscheme), given if inputs else None))


def gptq_int8(group_size: int, **changes: Any) -> dict[str, Any]:
    return gptq(group_size, bits=8, **changes)


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
        **changes,
    }


_STATIC = INT8_INPUTS | {"dynamic": False, "strategy": "tensor"}
_FP8_INPUTS = INT8_INPUTS | {"type": "float"}

LAYOUTS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "w8a8": (write_plain_int(), ct_int(inputs=INT8_INPUTS)),
    "w8a8 static": (write_plain_int(static=True), ct_int(inputs=_STATIC)),
    "w8a8 tensors": (write_plain_int(0), ct_int(0, inputs=INT8_INPUTS)),
    "w8a8 asymmetric inputs": (
        write_plain_int(static=True),
        ct_int(inputs=_STATIC | {"symmetric": False}),
    ),
    "w8a16 channels": (write_packed_int8(-1), ct_int()),
    "w8a16 groups": (write_packed_int8(32), ct_int(32)),
    "w8a16 asymmetric": (
        write_packed_int8(32, symmetric=False),
        ct_int(32, symmetric=False),
    ),
    "w8a16 unpacked": (
        write_plain_int(16, symmetric=False),
        ct_int(16, symmetric=False, form="naive-quantized"),
    ),
    "gptq": (write_gptq_int8(32), gptq_int8(32)),
    "gptq channels": (write_gptq_int8(-1), gptq_int8(-1)),
    "gptq asymmetric": (
        write_gptq_int8(32, symmetric=False, stored_less=0),
        gptq_int8(32, sym=False, checkpoint_format="gptq_v2"),
    ),
    "gptq ordered": (write_gptq_int8(32, ordered=True), gptq_int8(32, desc_act=True)),
    "auto-round": (write_gptq_int8(32), auto_round(32, bits=8)),
    "w4a8": (write_plain_int(bits=4), ct_int(inputs=INT8_INPUTS, num_bits=4)),
    "w4afp8": (write_plain_int(32, bits=4), ct_int(32, inputs=_FP8_INPUTS, num_bits=4)),
    "quark w8a8": (write_quark(), quark_int8()),
    "quark w8a8 static tensors": (
        write_quark(0, static=True),
        quark_int8(qscheme="per_tensor", is_dynamic=False),
    ),
    "quark w8a16": (write_quark(), quark_int8(inputs=False)),
    "modelopt sq": (write_modelopt(-1, 8), modelopt("W8A8_SQ_PER_CHANNEL")),
    "modelopt w4a8": (write_modelopt(32, 4), modelopt("W4A8_AWQ", group_size=32)),
}


def write_pair(checkpoints: Path, folder: Path, family: str, layout: str) -> Pair:
    """Writes a family quantised, and plain with the same meaning."""
    writer, config = LAYOUTS[layout]
    quantised, plain = folder / "quantised", folder / "plain"
    left = ("mlp.gate.", "block_sparse_moe.gate.")
    quantise_checkpoint(checkpoints / family, quantised, plain, writer, config, left)
    return quantised, plain
