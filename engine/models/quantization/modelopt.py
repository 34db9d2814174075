"""Reads `quant_method: modelopt`, in config.json or, before, in a file of its own."""

from __future__ import annotations

import msgspec

from engine.models.quantization.compressed_tensors import read_kv_cache
from engine.models.quantization.fields import Fields
from engine.models.quantization.fp8 import LM_HEAD
from engine.models.quantization.modelopt_integers import INTEGERS
from engine.models.quantization.packed import group_size_of
from engine.quantization import Fp8Scheme, Int4Scheme, Quantization, Scheme, SchemeRule

_ALGORITHMS: dict[str, Scheme] = {
    "fp8": Fp8Scheme(scales="tensor", activations="static"),
    "fp8_per_channel_per_token": Fp8Scheme(scales="channel"),
    **INTEGERS,
}


def read_modelopt(fields: Fields) -> Quantization:
    """Reads what config.json says, or `quantization` of hf_quant_config.json. Without an algorithm
    only the KV cache is quantised."""
    fields.expect("kv_cache_quant_algo", "fp8")
    scheme = read_kv_cache(fields)
    kv_cache = "fp8" if fields.has("kv_cache_quant_algo") else scheme
    fields.expect("quant_algo", *_ALGORITHMS)
    algorithm = _ALGORITHMS.get(fields.word("quant_algo"))
    if algorithm is None and kv_cache is None:
        raise fields.refused("quant_algo", "weights quantised by an algorithm without a name")
    if isinstance(algorithm, Int4Scheme):
        size = group_size_of(fields, algorithm.group_size)
        algorithm = msgspec.structs.replace(algorithm, group_size=size)
        fields.expect("has_zero_point", False)
        fields.ignore("pre_quant_scale")
    excluded = fields.names("exclude_modules") + fields.names("ignore")
    # config_groups says in another way what quant_algo says.
    fields.ignore("config_groups", "group_size", "producer", "quant_method", "version")
    return Quantization(
        method="modelopt",
        rules=() if algorithm is None else (SchemeRule(("Linear",), algorithm),),
        ignored=(*excluded, LM_HEAD),
        kv_cache=kv_cache,
    )
