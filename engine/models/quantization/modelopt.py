"""Reads `quant_method: modelopt`, in config.json or, before, in a file of its own."""

from __future__ import annotations

from engine.models.quantization.compressed_tensors import read_kv_cache
from engine.models.quantization.fields import Fields
from engine.models.quantization.fp8 import LM_HEAD
from engine.quantization import Fp8Scheme, Quantization, SchemeRule

_ALGORITHMS = {
    "FP8": Fp8Scheme(scales="tensor", activations="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme(scales="channel"),
}


def read_modelopt(fields: Fields) -> Quantization:
    """Reads what config.json says, or `quantization` of hf_quant_config.json."""
    algorithm = fields.get("quant_algo", str, "")
    if algorithm not in _ALGORITHMS:
        raise fields.refused("quant_algo", repr(algorithm))
    kv_cache = fields.get("kv_cache_quant_algo", str, "")
    scheme = read_kv_cache(fields.part("kv_cache_scheme"))
    if kv_cache not in ("", "FP8"):
        raise fields.refused("kv_cache_quant_algo", repr(kv_cache))
    excluded = fields.names("exclude_modules") + fields.names("ignore")
    # config_groups says in another way what quant_algo says.
    fields.ignore("config_groups", "producer", "quant_method", "version")
    return Quantization(
        method="modelopt",
        rules=(SchemeRule(("Linear",), _ALGORITHMS[algorithm]),),
        ignored=(*excluded, LM_HEAD),
        kv_cache="fp8" if kv_cache else scheme,
    )
