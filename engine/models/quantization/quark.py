"""Reads `quant_method: quark`, AMD's: MXFP4, NVFP4, FP8 and INT8 with scales per tensor or output,
and integers of 4 bits.

`layer_quant_config` has exceptions by name, `global_quant_config` what holds for all others. An FP8
KV cache is said three times: by `export.kv_cache_group` (the layers whose outputs it has),
`kv_cache_quant_config`, and the outputs of these layers.
"""

from __future__ import annotations

from msgspec import structs

from engine.models.quantization.fields import Fields
from engine.models.quantization.fp8 import LM_HEAD
from engine.quantization import (
    Activations,
    Fp8Scheme,
    Int4Scheme,
    Int8Scheme,
    IntegerLayout,
    Mxfp4Scheme,
    Nvfp4Scheme,
    Quantization,
    Scheme,
    SchemeRule,
)

_FOUND_BY = (
    "ch_axis", "enable_buffer_reuse", "is_scale_quant", "max_input_numel", "mx_element_dtype",
    "observer_cls", "percentile", "round_method", "scale_calculation_mode", "scale_type",
    "zero_point_type",
)  # fmt: skip
"""These say how scales were found, or what follows from the type of numbers."""
_FOUR_BIT_FLOATS = ("fp4", "e2m1", "fp4_e2m1")


def read_quark(fields: Fields) -> Quantization:
    cached = _cached_outputs(fields)
    if fields.get("layer_type_quant_config", object, None):
        raise fields.unsupported("layer_type_quant_config")
    # Weights of attention in FP8 are for kernels that multiply in FP8.
    fields.ignore(
        "algo_config", "log_severity_level", "quant_mode", "softmax_quant_spec", "version"
    )
    exceptions = fields.get("layer_quant_config", dict[str, dict[str, object]], {})
    rules = [
        SchemeRule(
            Fields(fields.place, {"names": [name]}).names("names"),
            _scheme(Fields(f"{fields.place}.layer_quant_config.{name}", config), cached),
        )
        for name, config in exceptions.items()
    ]
    general = fields.part("global_quant_config")
    if general is not None:
        rules.append(SchemeRule(("Linear",), _scheme(general, False)))
    if not rules:
        raise fields.refused("global_quant_config", "no quantised layers")
    return Quantization(
        method="quark",
        rules=tuple(rules),
        ignored=(*fields.names("exclude"), LM_HEAD),
        kv_cache="fp8" if cached else None,
    )


def _cached_outputs(fields: Fields) -> bool:
    """Returns whether keys and values are meant to be cached in FP8."""
    groups: list[str] = []
    export = fields.part("export")
    if export is not None:
        export.expect("weight_format", "real_quantized")
        export.expect("pack_method", "reorder")
        groups = export.get("kv_cache_group", list[str], [])
        # The least that scales were let to be when they were found.
        export.ignore("min_kv_scale", "weight_merge_groups")
        export.finish()
    fields.expect("kv_cache_post_rope", False)
    caches = fields.get("kv_cache_quant_config", dict[str, dict[str, object]], {})
    for name, config in caches.items():
        cache = Fields(f"{fields.place}.kv_cache_quant_config.{name}", config)
        _check_output(cache)
    return bool(groups or caches)


def _check_output(config: Fields) -> None:
    """Raises `UnsupportedField` unless outputs are as they are or in e4m3 with one scale."""
    output = config.part("output_tensors")
    if output is not None:
        output.expect("dtype", "e4m3")
        output.expect("qscheme", "per_tensor")


def _scheme(config: Fields, is_cached: bool) -> Scheme:
    """Reads what one group of layers is quantised by. `is_cached`: its outputs may be in FP8, which
    is that of the KV cache."""
    if is_cached:
        _check_output(config)
    else:
        config.expect("output_tensors")
    for name in ("bias", "target_device"):
        config.expect(name)
    inputs = config.steps("input_tensors")
    if not (weights := config.steps("weight")):
        raise config.refused("weight", "layers without quantised weights")
    config.finish()
    if len(weights) == 2:
        return _two_steps(*weights)
    if len(weights) > 2:
        raise config.refused("weight", f"weights quantised in {len(weights)} steps")
    return _one_step(weights[0], inputs[0] if inputs else None)


def _two_steps(weight: Fields, scale: Fields) -> Scheme:
    """Reads weights whose scales are quantised themselves."""
    weight.expect("dtype", *_FOUR_BIT_FLOATS)
    weight.expect("qscheme", "per_group")
    weight.expect("group_size", 16)
    weight.expect("scale_format", "float32")
    scale.expect("dtype", "e4m3")
    scale.expect("qscheme", "per_tensor")
    for part in (weight, scale):
        part.expect("is_dynamic", False)
        part.expect("symmetric", True)
        part.expect("block_size")
        part.ignore(*_FOUND_BY)
    scale.ignore("group_size", "scale_format")
    weight.finish()
    scale.finish()
    return Nvfp4Scheme(layout="modelopt")


def _one_step(weight: Fields, inputs: Fields | None) -> Scheme:
    numbers, shared_by = weight.word("dtype"), weight.word("qscheme")
    weight.expect("is_dynamic", False)
    weight.expect("block_size")
    weight.ignore(*_FOUND_BY)
    scheme: Scheme
    if (numbers, shared_by) == ("uint4", "per_group"):
        weight.ignore("scale_format", "symmetric")
        scheme = _four_bits(weight, inputs, is_signed=False)
    elif (numbers, shared_by) == ("int4", "per_group"):
        weight.expect("symmetric", True)
        weight.ignore("scale_format")
        scheme = _four_bits(weight, inputs, is_signed=True)
    elif numbers in _FOUR_BIT_FLOATS and shared_by == "per_group":
        weight.expect("symmetric", True)
        weight.expect("scale_format", "e8m0")
        weight.expect("group_size", 32)
        scheme = Mxfp4Scheme("modelopt")
    elif numbers == "e4m3" and shared_by in ("per_tensor", "per_channel"):
        weight.expect("symmetric", True)
        weight.ignore("group_size", "scale_format")
        is_static = inputs is not None and not inputs.get("is_dynamic", bool, False)
        scheme = Fp8Scheme(
            scales="tensor" if shared_by == "per_tensor" else "channel",
            activations="static" if is_static else "dynamic",
        )
    elif numbers == "int8" and shared_by in ("per_tensor", "per_channel"):
        weight.expect("symmetric", True)
        weight.ignore("group_size", "scale_format")
        scheme = _eight_bits(0 if shared_by == "per_tensor" else -1, inputs)
    else:
        raise weight.refused("dtype", f"weights in {numbers!r} with scales {shared_by!r}")
    weight.finish()
    return scheme


def _four_bits(weight: Fields, inputs: Fields | None, *, is_signed: bool) -> Int4Scheme:
    """Reads integers in the order of AWQ; zero points of signed ones are stored and are 0."""
    if inputs is not None:
        raise inputs.refused("dtype", f"4-bit integers beside inputs in {inputs.word('dtype')!r}")
    size = weight.get("group_size", int, 0)
    if size < 1:
        raise weight.unsupported("group_size")
    layout: IntegerLayout = "quark-signed" if is_signed else "quark"
    return Int4Scheme(layout=layout, group_size=size, symmetric=is_signed)


def _eight_bits(group_size: int, inputs: Fields | None) -> Int8Scheme:
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
