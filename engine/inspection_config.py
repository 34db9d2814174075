"""Frozen configuration of what the engine shows of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionConfig:
    """Says how far the engine lets itself be looked into.

    Attributes:
        kv_cache_metrics_sample: The part of all allocated blocks whose residency is measured; 0:
            none is.
        torch_profiler_dir: Folder for profiles; None: they are refused.
        torch_profiler_max_steps, torch_profiler_max_s: No profile is longer.
        crash_report_dir: Folder for reports of the engine's death; None: none is written.
        enable_mfu_metrics: Count what steps compute and move.
        device_peak_tflops, device_peak_gbps: What one GPU can do; None: as its name says.
    """

    enable_mfu_metrics: bool = False
    device_peak_tflops: float | None = None
    device_peak_gbps: float | None = None

    crash_report_dir: str | None = None

    torch_profiler_dir: str | None = None
    torch_profiler_max_steps: int = 100
    torch_profiler_max_s: float = 60.0

    kv_cache_metrics_sample: float = 0.0
