"""ModelOpt's algorithms with floats in small groups, by `quant_algo`."""

from __future__ import annotations

from engine.quantization import Mxfp4Scheme, Mxfp8Scheme, Nvfp4Scheme, Scheme

_NVFP4 = Nvfp4Scheme(layout="modelopt")

FLOATS: dict[str, Scheme] = {
    "nvfp4": _NVFP4,
    "w4a16_nvfp4": _NVFP4,
    "nvfp4_awq": Nvfp4Scheme(layout="modelopt", smoothed=True),
    "w4a8_nvfp4_fp8": Nvfp4Scheme(layout="modelopt", group_size=32),
    "mxfp4": Mxfp4Scheme("modelopt"),
    "w4a8_mxfp4_fp8": Mxfp4Scheme("modelopt"),
    "mxfp8": Mxfp8Scheme(),
}
