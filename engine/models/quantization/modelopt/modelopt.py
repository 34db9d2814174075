"""Reads `quant_method: modelopt`, in config.json or, before, in a file of its own."""

from __future__ import annotations

import re

import msgspec

from engine.models.config.wrappers import with_own_names
from engine.models.quantization.compressed_tensors import read_kv_cache
from engine.models.quantization.fields import Fields
from engine.models.quantization.fp8 import LM_HEAD
from engine.models.quantization.modelopt.modelopt_floats import FLOATS
from engine.models.quantization.modelopt.modelopt_integers import INTEGERS
from engine.models.quantization.packed import group_size_of
from engine.quantization import (
    Fp8Scheme,
    Int4Scheme,
    Mxfp4Scheme,
    Mxfp8Scheme,
    Nvfp4Scheme,
    Quantization,
    Scheme,
    SchemeRule,
)

_ALGORITHMS: dict[str, Scheme] = {
    "fp8": Fp8Scheme(scales="tensor", activations="static"),
    "fp8_per_channel_per_token": Fp8Scheme(scales="channel"),
    **INTEGERS,
    **FLOATS,
}
_MIXED = "mixed_precision"
"""Every layer has an algorithm of its own, by its name."""
_OTHER_EXPERT = re.compile(r"\.experts\.[1-9]\d*\.")


def read_modelopt(fields: Fields) -> Quantization:
    """Reads what config.json says, or `quantization` of hf_quant_config.json. Without an algorithm
    only the KV cache is quantised."""
    fields.expect("kv_cache_quant_algo", "fp8")
    scheme = read_kv_cache(fields)
    kv_cache = "fp8" if fields.has("kv_cache_quant_algo") else scheme
    rules: tuple[SchemeRule, ...] = ()
    if fields.word("quant_algo") == _MIXED:
        rules = _by_layers(fields)
        fields.ignore("has_zero_point", "pre_quant_scale")
    elif (algorithm := _algorithm(fields)) is not None:
        rules = (SchemeRule(("Linear",), algorithm),)
    elif kv_cache is None:
        raise fields.refused("quant_algo", "weights quantised by an algorithm without a name")
    excluded = fields.names("exclude_modules") + fields.names("ignore")
    # These say in another way what quant_algo says.
    fields.ignore("config_groups", "group_size", "quantized_layers")
    fields.ignore("producer", "quant_method", "version")
    return Quantization(
        method="modelopt",
        rules=rules,
        ignored=(*excluded, LM_HEAD),
        kv_cache=kv_cache,
    )


def _by_layers(fields: Fields) -> tuple[SchemeRule, ...]:
    """Returns a rule for each algorithm, with the names of its layers. Of a layer's experts the
    first one stands for all: they are computed together."""
    layers = fields.get("quantized_layers", dict[str, dict[str, object]], {})
    if not layers:
        raise fields.refused("quantized_layers", "layers of several algorithms, and names none")
    names: dict[Scheme, list[str]] = {}
    for name, values in layers.items():
        if _OTHER_EXPERT.search(name):
            continue
        own = Fields(f"{fields.place}.quantized_layers.{name}", values)
        scheme = _algorithm(own)
        if scheme is None:
            raise own.refused("quant_algo", "a layer without an algorithm")
        own.ignore("group_size")
        own.finish()
        names.setdefault(scheme, []).append(name)
    return tuple(SchemeRule(tuple(with_own_names(own)), scheme) for scheme, own in names.items())


def _algorithm(fields: Fields) -> Scheme | None:
    """Returns the scheme that `quant_algo` and the fields beside it mean; None: there is none."""
    fields.expect("quant_algo", *_ALGORITHMS)
    algorithm = _ALGORITHMS.get(fields.word("quant_algo"))
    if isinstance(algorithm, Int4Scheme | Nvfp4Scheme):
        size = group_size_of(fields, algorithm.group_size)
        if isinstance(algorithm, Nvfp4Scheme) and size % 16:
            raise fields.unsupported("group_size")
        algorithm = msgspec.structs.replace(algorithm, group_size=size)
        fields.expect("has_zero_point", False)
        fields.ignore("pre_quant_scale")
    elif isinstance(algorithm, Mxfp4Scheme | Mxfp8Scheme):
        fields.expect("group_size", 32)
    return algorithm
