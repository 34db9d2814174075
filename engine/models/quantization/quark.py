"""Reads `quant_method: quark`, AMD's: MXFP4, and FP8 and INT8 with scales per tensor or output.

`layer_quant_config` has exceptions by name, `global_quant_config` what holds for all others.
"""

from __future__ import annotations

from msgspec import structs

from engine.models.quantization.fields import Fields
from engine.models.quantization.fp8 import LM_HEAD
from engine.quantization import (
    Activations,
    Fp8Scheme,
    Int8Scheme,
    Mxfp4Scheme,
    Quantization,
    Scheme,
    SchemeRule,
)

_FOUND_BY = (
    "ch_axis", "is_scale_quant", "mx_element_dtype", "observer_cls", "percentile", "round_method",
    "scale_calculation_mode", "scale_type",
)  # fmt: skip
"""These say how scales were found, or what follows from the type of numbers."""


def read_quark(fields: Fields) -> Quantization:
    export = fields.part("export")
    if export is not None:
        export.expect("weight_format", "real_quantized")
        for name in ("kv_cache_group", "min_kv_scale"):
            if export.get(name, object, None):
                raise export.unsupported(name)
        export.ignore("pack_method", "weight_merge_groups")
        export.finish()
    for name in ("kv_cache_quant_config", "layer_type_quant_config", "softmax_quant_spec"):
        if fields.get(name, object, None):
            raise fields.unsupported(name)
    fields.ignore("algo_config", "log_severity_level", "quant_mode", "version")
    exceptions = fields.get("layer_quant_config", dict[str, dict[str, object]], {})
    rules = [
        SchemeRule(
            Fields(fields.place, {"names": [name]}).names("names"),
            _scheme(Fields(f"{fields.place}.layer_quant_config.{name}", config)),
        )
        for name, config in exceptions.items()
    ]
    general = fields.part("global_quant_config")
    if general is not None:
        rules.append(SchemeRule(("Linear",), _scheme(general)))
    if not rules:
        raise fields.refused("global_quant_config", "no quantised layers")
    return Quantization(
        method="quark", rules=tuple(rules), ignored=(*fields.names("exclude"), LM_HEAD)
    )


def _scheme(config: Fields) -> Scheme:
    weight, inputs = config.part("weight"), config.part("input_tensors")
    if weight is None:
        raise config.refused("weight", "layers without quantised weights")
    for name in ("bias", "output_tensors", "target_device"):
        config.expect(name)
    config.finish()
    numbers, shared_by = weight.word("dtype"), weight.word("qscheme")
    weight.expect("is_dynamic", False)
    weight.expect("symmetric", True)
    weight.ignore(*_FOUND_BY)
    scheme: Scheme
    if numbers in ("fp4", "e2m1", "fp4_e2m1") and shared_by == "per_group":
        weight.expect("group_size", 32)
        weight.expect("scale_format", "e8m0")
        scheme = Mxfp4Scheme("modelopt")
    elif numbers == "e4m3" and shared_by in ("per_tensor", "per_channel"):
        weight.ignore("group_size", "scale_format")
        is_static = inputs is not None and not inputs.get("is_dynamic", bool, False)
        scheme = Fp8Scheme(
            scales="tensor" if shared_by == "per_tensor" else "channel",
            activations="static" if is_static else "dynamic",
        )
    elif numbers == "int8" and shared_by in ("per_tensor", "per_channel"):
        weight.ignore("group_size", "scale_format")
        scheme = _integers(0 if shared_by == "per_tensor" else -1, inputs)
    else:
        raise weight.refused("dtype", f"weights in {numbers!r} with scales {shared_by!r}")
    weight.finish()
    return scheme


def _integers(group_size: int, inputs: Fields | None) -> Int8Scheme:
    """Returns INT8 weights beside inputs as they are, or in INT8."""
    scheme = Int8Scheme(layout="int-quantized", group_size=group_size, symmetric=True)
    if inputs is None:
        return scheme
    if (numbers := inputs.word("dtype")) != "int8":
        raise inputs.refused("dtype", f"INT8 weights beside inputs in {numbers!r}")
    activations: Activations = "dynamic" if inputs.get("is_dynamic", bool, False) else "static"
    if not inputs.get("symmetric", bool, True):
        activations = "none"
    return structs.replace(scheme, activations=activations, activation_numbers="int8")
