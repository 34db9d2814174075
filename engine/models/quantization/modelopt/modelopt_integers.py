"""ModelOpt's algorithms with integer weights, by `quant_algo`.

Layers whose inputs ModelOpt could not smooth in the norm before them have `pre_quant_scale`.
"""

from __future__ import annotations

from engine.quantization import Int4Scheme, Int8Scheme, Scheme

INTEGERS: dict[str, Scheme] = {
    "w8a16": Int8Scheme(layout="int-quantized", group_size=-1, symmetric=True),
    "w8a8_sq_per_channel": Int8Scheme(
        layout="int-quantized",
        group_size=-1,
        symmetric=True,
        activations="static",
        activation_numbers="int8",
        smoothed=True,
    ),
    "w4a16_awq": Int4Scheme(layout="modelopt", group_size=128, symmetric=True, smoothed=True),
    "w4a8_awq": Int4Scheme(
        layout="modelopt",
        group_size=128,
        symmetric=True,
        activations="static",
        activation_numbers="e4m3",
        smoothed=True,
    ),
}
