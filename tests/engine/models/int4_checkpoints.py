"""Writes 4-bit weights as AWQ, GPTQ and compressed-tensors publish them.

Packing follows the formats' definitions nibble by nibble, apart from the product's code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.engine.models.quantised_checkpoints import Stored, Writer, compressed_tensors
from tests.engine.models.quark_checkpoints import quark_config, quark_layers, quark_numbers

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The lowest nibble of a word holds column 0, the next one column 2, and so on."""


def pack(
    numbers: Tensor, dim: int, nibbles: tuple[int, ...] = tuple(range(8)), bits: int = 4
) -> Tensor:
    """Packs eight neighbours along a dimension, or four of 8 bits, into an int32, padded with
    zeros."""
    count = 32 // bits
    moved = numbers.movedim(dim, -1).long()
    padding = moved.new_zeros(*moved.shape[:-1], -moved.shape[-1] % count)
    columns = torch.cat((moved, padding), dim=-1).unflatten(-1, (-1, count))
    words = (columns[..., list(nibbles[:count])] << bits * torch.arange(count)).sum(-1)
    signed = torch.where(words >= 2**31, words - 2**32, words).int()
    return signed.movedim(-1, dim).contiguous()


def quantised(
    layer: str, weight: Tensor, group_size: int, *, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (numbers [out, in], scales [out, groups] float16, zeros [out, groups], the group of
    each input, the meaning). `order`: inputs from the most to the least important one, which are
    grouped so."""
    num_outputs, num_inputs = weight.shape
    size = num_inputs if group_size < 0 else group_size
    place = torch.arange(num_inputs) if order is None else order.argsort()
    group_of = place // size
    num_groups = -(-num_inputs // size)
    scales = torch.zeros(num_outputs, num_groups, dtype=torch.float16)
    zeros = torch.full((num_outputs, num_groups), 8)
    for group in range(num_groups):
        own = weight[:, group_of == group]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if symmetric:
            scales[:, group] = own.abs().amax(1) / 7.5
        else:
            scales[:, group] = (high - low) / 15
            zeros[:, group] = (-low / scales[:, group].float()).round().clamp(1, 15)
    wide = scales.float()[:, group_of]
    numbers = ((weight / wide).round() + zeros[:, group_of]).clamp(0, 15).long()
    meaning = (numbers - zeros[:, group_of]).float() * wide
    return numbers, scales, zeros, group_of.int(), meaning


def write_awq(group_size: int, *, symmetric: bool = False) -> Writer:
    """Returns the writer of AutoAWQ's layout, which has zero points in either case."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        numbers, scales, zeros, _, meaning = quantised(
            layer, weight, group_size, symmetric=symmetric
        )
        return {
            f"{layer}.qweight": pack(numbers.t(), 1, AWQ_NIBBLES),
            f"{layer}.qzeros": pack(zeros.t(), 1, AWQ_NIBBLES),
            f"{layer}.scales": scales.t(),
        }, meaning

    return write


def input_order(num_inputs: int) -> Tensor:
    """Returns the order of a layer's inputs: that of all layers with as many."""
    return torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))


def write_gptq(
    group_size: int, *, symmetric: bool, ordered: bool = False, stored_less: int = 1
) -> Writer:
    """Returns the writer of AutoGPTQ's layout, which gives layers without a bias one of zeros."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        order = input_order(weight.shape[1]) if ordered else None
        numbers, scales, zeros, group_of, meaning = quantised(
            layer, weight, group_size, symmetric=symmetric, order=order
        )
        stored = {
            f"{layer}.qweight": pack(numbers.t(), 0),
            f"{layer}.qzeros": pack((zeros.t() - stored_less) % 16, 1),
            f"{layer}.scales": scales.t(),
            f"{layer}.g_idx": group_of,
        }
        if layer.endswith(("o_proj", "down_proj")):
            stored[f"{layer}.bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return stored, meaning

    return write


def write_ct_int4(group_size: int, *, symmetric: bool, ordered: bool = False) -> Writer:
    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        order = input_order(weight.shape[1]) if ordered else None
        numbers, scales, zeros, group_of, meaning = quantised(
            layer, weight, group_size, symmetric=symmetric, order=order
        )
        stored = {
            f"{layer}.weight_packed": pack(numbers, 1),
            f"{layer}.weight_scale": scales,
            f"{layer}.weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored[f"{layer}.weight_zero_point"] = pack(zeros, 0)
        if ordered:
            stored[f"{layer}.weight_g_idx"] = group_of
        return stored, meaning

    return write


def awq(group_size: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }


def gptq(group_size: int, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
        "damp_percent": 0.1,
        "lm_head": False,
        "true_sequential": True,
        **changes,
    }


def write_auto_round(group_size: int, *, symmetric: bool, stored_less: int = 1) -> Writer:
    """Returns the writer of AutoRound's layouts like GPTQ's, which list no groups of inputs."""
    write_one = write_gptq(group_size, symmetric=symmetric, stored_less=stored_less)

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        stored, meaning = write_one(layer, weight)
        return {name: t for name, t in stored.items() if not name.endswith("g_idx")}, meaning

    return write


def auto_round(group_size: int, form: str = "auto_gptq", **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:{form}",
        "autoround_version": "0.8.0",
        "bits": 4,
        "data_type": "int",
        "group_size": group_size,
        "sym": True,
        "iters": 200,
        "block_name_to_quantize": "model.layers",
        **changes,
    }


def ct_int4(group_size: int, *, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group_size > 0 else "channel",
        "group_size": group_size if group_size > 0 else None,
        **changes,
    }
    config = compressed_tensors(weights, format="pack-quantized")
    config["config_groups"]["group_0"]["input_activations"] = None
    return config


def write_quark_int4(group_size: int, *, is_signed: bool) -> Writer:
    """Returns the writer of Quark's layout: AWQ's order under other names, and of signed numbers
    two's complements and zeros that are 0."""

    def write(layer: str, weight: Tensor) -> tuple[Stored, Tensor]:
        numbers, scales, zeros, _, meaning = quantised(
            layer, weight, group_size, symmetric=is_signed
        )
        less = 8 if is_signed else 0
        return {
            f"{layer}.weight": pack((numbers.t() - less) % 16, 1, AWQ_NIBBLES),
            f"{layer}.weight_zero_point": pack((zeros.t() - less) % 16, 1, AWQ_NIBBLES),
            f"{layer}.weight_scale": scales.t(),
        }, meaning

    return write


def quark_int4(group_size: int, *, is_signed: bool) -> dict[str, Any]:
    numbers = quark_numbers(
        "int4" if is_signed else "uint4", "per_group", group_size=group_size, symmetric=is_signed
    )
    return quark_config(quark_layers(numbers))


LAYOUTS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (write_awq(32), awq(32)),
    "gptq": (write_gptq(16, symmetric=True), gptq(16)),
    "gptq asymmetric": (write_gptq(32, symmetric=False), gptq(32, sym=False)),
    "gptq v2, whole rows": (
        write_gptq(-1, symmetric=False, stored_less=0),
        gptq(-1, sym=False, checkpoint_format="gptq_v2"),
    ),
    "gptq ordered": (write_gptq(32, symmetric=True, ordered=True), gptq(32, desc_act=True)),
    "ct": (write_ct_int4(32, symmetric=True), ct_int4(32)),
    "ct asymmetric": (write_ct_int4(32, symmetric=False), ct_int4(32, symmetric=False)),
    "ct channels": (write_ct_int4(-1, symmetric=True), ct_int4(-1)),
    "ct ordered": (
        write_ct_int4(32, symmetric=True, ordered=True),
        ct_int4(32, actorder="group"),
    ),
    "quark": (write_quark_int4(32, is_signed=False), quark_int4(32, is_signed=False)),
    "quark signed": (write_quark_int4(32, is_signed=True), quark_int4(32, is_signed=True)),
}
