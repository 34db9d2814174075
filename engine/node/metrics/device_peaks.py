"""Knows what a GPU can do at most: dense FLOP/s without sparsity, and the bandwidth of its memory.

`device_peaks.json` has them by the name that the driver gives the GPU, from NVIDIA's data sheets. A
part of a GPU (MIG) has a name of its own and is not there.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.quantization import Fp8Scheme

logger = logging.getLogger(__name__)

_TABLE = Path(__file__).with_suffix(".json")


class DevicePeaks(msgspec.Struct, frozen=True):
    """The peaks of one GPU: 10^12 FLOP/s in 16 bits and in FP8, and 10^9 bytes/s; None: unknown."""

    tflops: float | None = None
    gbps: float | None = None
    fp8_tflops: float | None = None


def peaks_of(config: EngineConfig, device_name: str) -> DevicePeaks:
    """Returns the peaks that the engine is measured by: those of settings, else of the GPU in the
    type in which it multiplies. What is unknown is logged, with the flag that helps."""
    given, known = config.inspection, _table().get(device_name, DevicePeaks())
    tflops = known.fp8_tflops if _multiplies_in_fp8(config) else known.tflops
    peaks = DevicePeaks(given.device_peak_tflops or tflops, given.device_peak_gbps or known.gbps)
    for value, flag, gauge in (
        (peaks.tflops, "--device-peak-tflops", "tandem_model_flops_utilization"),
        (peaks.gbps, "--device-peak-gbps", "tandem_memory_bandwidth_utilization"),
    ):
        if value is None:
            logger.warning(
                "what %s can do is not known here: set %s, or there is no %s",
                device_name or f"device {config.device.device}",
                flag,
                gauge,
            )
    if peaks.tflops and peaks.gbps:
        logger.info("utilisation is of %g TFLOP/s and %g GB/s", peaks.tflops, peaks.gbps)
    return peaks


def _multiplies_in_fp8(config: EngineConfig) -> bool:
    quantization = config.model.quantization
    if quantization is None or not config.device.allows("fp8-gemm"):
        return False
    schemes = [rule.scheme for rule in quantization.rules]
    return any(isinstance(one, Fp8Scheme) and one.activations != "none" for one in schemes)


@cache
def _table() -> dict[str, DevicePeaks]:
    return msgspec.json.decode(_TABLE.read_bytes(), type=dict[str, DevicePeaks])
