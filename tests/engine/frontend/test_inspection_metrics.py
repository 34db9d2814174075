"""Metrics that exist only where a setting asks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.contracts.outputs import KindRates, ResidencyStats, WorkStats
from engine.inspection_config import InspectionConfig
from engine.node.metrics.device_peaks import DevicePeaks, peaks_of
from engine.node.metrics.inspection_metrics import residency_metrics, work_metrics
from engine.quantization import Fp8Scheme, Quantization, SchemeRule
from tests.engine.core.tiny_engine import tiny_config

LABELS, VALUES = ("model_name", "engine"), ("m", "0")


def test_residency_is_told_in_seconds_under_names_of_vllm() -> None:
    stats = ResidencyStats()
    stats.lifetime.add(1.5)
    stats.lifetime.add(4000.0)
    stats.reuse_gap.add(0.0015)
    assert list(residency_metrics(None, LABELS, VALUES)) == []
    found = {
        (sample.name.removeprefix("vllm:kv_block_"), sample.labels.get("le", "")): sample.value
        for family in residency_metrics(stats, LABELS, VALUES)
        for sample in family.samples
    }
    assert found["lifetime_seconds_bucket", "1.0"] == 0
    assert found["lifetime_seconds_bucket", "2.0"] == 1
    assert found["lifetime_seconds_bucket", "1800.0"] == 1
    assert found["lifetime_seconds_count", ""] == found["lifetime_seconds_bucket", "+Inf"] == 2
    assert found["lifetime_seconds_sum", ""] == 4001.5
    assert found["reuse_gap_seconds_bucket", "0.002"] == 1
    assert found["idle_before_evict_seconds_count", ""] == 0


def measured(**given: float) -> EngineConfig:
    inspection = InspectionConfig(enable_mfu_metrics=True, **given)
    return replace(tiny_config(), inspection=inspection)


def test_peaks_are_those_of_settings_then_of_the_gpus_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert peaks_of(measured(), "NVIDIA H200") == DevicePeaks(989, 4800)
    given = measured(device_peak_tflops=7.0, device_peak_gbps=8.0)
    assert peaks_of(given, "NVIDIA H200") == DevicePeaks(7.0, 8.0)
    assert caplog.records == []
    rule = SchemeRule(("Linear",), Fp8Scheme(scales="tensor"))
    quantised = Quantization(method="fp8", rules=(rule,))
    in_fp8 = replace(measured(), model=replace(tiny_config().model, quantization=quantised))
    assert peaks_of(in_fp8, "NVIDIA H200") == DevicePeaks(1979, 4800)
    part = "NVIDIA H200 MIG 1g.18gb"
    assert peaks_of(measured(device_peak_gbps=600.0), part) == DevicePeaks(None, 600.0)
    (said,) = caplog.messages
    assert part in said and "--device-peak-tflops" in said


def test_utilisation_is_told_by_kind_where_the_peak_is_known() -> None:
    stats = WorkStats(flops=5e12, read_bytes=6e9, write_bytes=7e9)
    stats.kinds["decode"] = KindRates(flops=2e12, num_bytes=1e12, seconds=0.5)
    stats.kinds["mixed"] = KindRates()
    assert list(work_metrics(None, DevicePeaks(1, 1), LABELS, VALUES)) == []
    found = {
        (sample.name, sample.labels.get("kind")): sample.value
        for family in work_metrics(stats, DevicePeaks(10.0, None), LABELS, VALUES)
        for sample in family.samples
    }
    assert found == {
        ("vllm:estimated_flops_per_gpu_total", None): 5e12,
        ("vllm:estimated_read_bytes_per_gpu_total", None): 6e9,
        ("vllm:estimated_write_bytes_per_gpu_total", None): 7e9,
        ("tandem_model_flops_utilization", "decode"): 0.4,
    }
    both = work_metrics(stats, DevicePeaks(10.0, 4000.0), LABELS, VALUES)
    (last,) = list(both)[-1].samples
    assert (last.name, last.value) == ("tandem_memory_bandwidth_utilization", 0.5)
