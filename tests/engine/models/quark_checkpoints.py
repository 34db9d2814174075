"""Writes `quantization_config` as Quark 0.13 does."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def quark_numbers(dtype: str, qscheme: str, **changes: Any) -> Config:
    """Returns how some tensors are quantised, with all that Quark says of it."""
    return {
        "dtype": dtype,
        "qscheme": qscheme,
        "is_dynamic": False,
        "symmetric": True,
        "ch_axis": 0 if qscheme == "per_channel" else None,
        "group_size": None,
        "block_size": None,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": None,
        "scale_calculation_mode": None,
        "mx_element_dtype": None,
        "observer_cls": "PerTensorMinMaxObserver",
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
        "zero_point_type": "int32",
        **changes,
    }


def quark_layers(weight: Any, inputs: Any = None, outputs: Any = None) -> Config:
    """Returns how some layers are quantised."""
    return {
        "weight": weight,
        "input_tensors": inputs,
        "output_tensors": outputs,
        "bias": None,
        "target_device": None,
    }


def quark_config(layers: Config, **changes: Any) -> Config:
    """Returns the whole, of a model whose layers are all quantised so."""
    return {
        "quant_method": "quark",
        "global_quant_config": layers,
        "exclude": ["lm_head", "*.mlp.gate"],
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_mode": "eager_mode",
        "version": "0.13",
        "export": quark_export(),
        **changes,
    }


def quark_export(**changes: Any) -> Config:
    return {
        "kv_cache_group": [],
        "min_kv_scale": 0.0,
        "pack_method": "reorder",
        "weight_format": "real_quantized",
        "weight_merge_groups": None,
        **changes,
    }
