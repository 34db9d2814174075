"""Reads `quant_method: compressed-tensors`: groups of layers, each with a scheme of its own."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.models.quantization.fields import Fields
from engine.models.quantization.integers import SCHEMES, Inputs, read_integers
from engine.models.quantization.micro_floats import (
    MICRO_FORMATS,
    MICRO_SCALE_TYPES,
    read_micro_floats,
)
from engine.quantization import Fp8Scheme, Quantization, Scheme, SchemeRule

_STATES = ("compressed", "frozen")
_SCALE_TYPES = ("float16", "bfloat16", "float32")
_FORMATS = (
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "naive-quantized",
    *MICRO_FORMATS,
)
_PLAIN = "dense"
_OF_WEIGHTS = ("weight_input", "weight_output")


class _Step(msgspec.Struct):
    location: str


class _Transform(msgspec.Struct):
    """Says where one kind of rotation is applied."""

    apply: list[_Step] = []


def read_compressed_tensors(fields: Fields) -> Quantization:
    fields.expect("quantization_status", *_STATES)
    groups = fields.get("config_groups", dict[str, dict[str, object]], {})
    kv_cache = read_kv_cache(fields)
    is_plain = not groups and kv_cache is not None
    fields.expect("format", *_FORMATS, "mixed-precision", *((_PLAIN,) if is_plain else ()))
    fields.ignore("global_compression_ratio", "provider", "version")
    sparsity = fields.part("sparsity_config")
    if sparsity is not None and sparsity.word("format") != _PLAIN:
        raise fields.refused("sparsity_config", "sparse weights")
    _check_rotations(fields.part("transform_config"))
    place = f"{fields.place}.config_groups"
    form = fields.word("format")
    rules = _by_name_first(
        [_rule(Fields(f"{place}.{name}", group), form) for name, group in groups.items()]
    )
    if not rules and not is_plain:
        raise fields.refused("config_groups", "no group of layers")
    return Quantization(
        method="compressed-tensors",
        rules=rules,
        ignored=fields.names("ignore"),
        kv_cache=kv_cache,
    )


def _check_rotations(transforms: Fields | None) -> None:
    """Raises `UnsupportedField` where inputs or outputs are rotated while a model runs. What is
    done to weights alone, such as R1 and R2 of SpinQuant, they already have."""
    if transforms is None:
        return
    groups = transforms.get("config_groups", dict[str, _Transform], {})
    transforms.finish()
    for name, group in groups.items():
        for step in group.apply:
            if step.location not in _OF_WEIGHTS:
                place = f"config_groups.{name}.apply.location"
                raise transforms.refused(place, f"rotations of {step.location!r}")


def _by_name_first(rules: list[SchemeRule]) -> tuple[SchemeRule, ...]:
    """Returns the rules in the order of compressed-tensors: what a layer's name says goes before
    what its class says, whatever group comes first."""
    named = [
        SchemeRule(names, rule.scheme)
        for rule in rules
        if (names := tuple(name for name in rule.targets if name != "Linear"))
    ]
    return (*named, *(SchemeRule(("Linear",), r.scheme) for r in rules if "Linear" in r.targets))


def _rule(group: Fields, form: str) -> SchemeRule:
    """Reads one group; `form` is the checkpoint's format, where the group has none of its own."""
    targets = group.names("targets")
    group.expect("format", *_FORMATS)
    weights = group.part("weights")
    if weights is None or not targets:
        raise group.refused("weights", "a group without weights or targets")
    inputs = _inputs(group.part("input_activations"))
    group.expect("output_activations")
    group.finish()
    scheme = _scheme(weights, group.word("format", form), inputs)
    weights.finish()
    return SchemeRule(targets, scheme)


def _scheme(weights: Fields, form: str, inputs: Inputs) -> Scheme:
    bits, kind = weights.get("num_bits", int, 8), weights.word("type", "int")
    weights.expect("dynamic", False)
    # Without zero points their type says nothing.
    is_symmetric = weights.get("symmetric", bool, True)
    weights.expect("zp_dtype", "int8", *(MICRO_SCALE_TYPES if is_symmetric else ()))
    weights.ignore("observer", "observer_kwargs")
    if kind == "float" and (bits == 4 or form in MICRO_FORMATS):
        weights.expect("scale_dtype", *_SCALE_TYPES, *MICRO_SCALE_TYPES)
        return read_micro_floats(weights, bits, form)
    if inputs.numbers == "e2m1":
        raise weights.refused("num_bits", f"weights of {bits} bits beside inputs of 4 bits")
    weights.expect("scale_dtype", *_SCALE_TYPES)
    if (bits, kind) == (8, "float"):
        return _fp8(weights, inputs)
    if bits in SCHEMES and kind == "int":
        weights.ignore("block_structure")
        return read_integers(weights, bits, form, inputs)
    raise weights.refused("num_bits", f"weights of {bits} bits, type {kind!r}")


def _fp8(weights: Fields, inputs: Inputs) -> Scheme:
    if not weights.get("symmetric", bool, True):
        raise weights.refused("symmetric", "FP8 weights with zero points")
    if inputs.numbers == "int8":
        raise weights.refused("num_bits", "FP8 weights beside inputs in int8")
    strategy = weights.word("strategy")
    block = weights.get("block_structure", list[int], [])
    weights.ignore("group_size", "actorder")
    if strategy == "block" and len(block) == 2:
        return Fp8Scheme(scales="block", block=(block[0], block[1]), activations=inputs.activations)
    if strategy == "channel":
        return Fp8Scheme(scales="channel", activations=inputs.activations)
    if strategy == "tensor":
        return Fp8Scheme(scales="tensor", activations=inputs.activations)
    raise weights.refused("strategy", f"FP8 weights with scales per {strategy!r}")


def _inputs(fields: Fields | None) -> Inputs:
    if fields is None:
        return Inputs()
    bits, kind = fields.get("num_bits", int, 8), fields.word("type", "int")
    if (bits, kind) not in ((8, "float"), (8, "int"), (4, "float")):
        raise fields.refused("num_bits", f"activations of {bits} bits, type {kind!r}")
    is_symmetric = fields.get("symmetric", bool, True)
    if kind == "float":
        fields.expect("symmetric", True)
    # Of NVFP4, scales of groups are dynamic, and their factor is static.
    dynamic = bool(fields.choice("dynamic", False, True, "local"))
    fields.expect("strategy", "tensor", *(("token", "group", "tensor_group") if dynamic else ()))
    fields.expect("group_size", 16, 32, 128)
    fields.expect("scale_dtype", *_SCALE_TYPES, *MICRO_SCALE_TYPES)
    fields.expect("zp_dtype", "int8", *MICRO_SCALE_TYPES)
    fields.expect("block_structure")
    fields.expect("actorder")
    fields.ignore("observer", "observer_kwargs")
    fields.finish()
    numbers = "int8" if kind == "int" else "e4m3" if bits == 8 else "e2m1"
    return Inputs("dynamic" if dynamic else "static", numbers, is_symmetric)


def read_kv_cache(fields: Fields) -> Literal["fp8"] | None:
    """Returns what `kv_cache_scheme` recommends for the KV cache: an object, or, as ModelOpt writes
    it, the name of an algorithm. Raises `UnsupportedField` unless that is FP8."""
    name = "kv_cache_scheme"
    if isinstance(fields.get(name, object, None), str):
        fields.expect(name, "fp8")
        return "fp8"
    scheme = fields.part(name)
    if scheme is None:
        return None
    bits, kind = scheme.get("num_bits", int, 8), scheme.word("type", "int")
    if (bits, kind) not in ((8, "float"), (8, "e4m3")):
        raise scheme.refused("num_bits", f"a KV cache of {bits} bits, type {kind!r}")
    return "fp8"
