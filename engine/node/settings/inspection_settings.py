"""Settings of how far a node lets its engine be looked into."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings

from engine.inspection_config import InspectionConfig


class InspectionSettings(BaseSettings):
    """See docs/inspection.md. Flags have vLLM's names where it has them."""

    kv_cache_metrics: bool = Field(
        default=False,
        description="Measure how long KV blocks stay, lie idle and wait for their reuse, in "
        "histograms such as vllm:kv_block_lifetime_seconds.",
    )
    kv_cache_metrics_sample: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="With --kv-cache-metrics: the part of all allocated blocks that is measured.",
    )

    torch_profiler_dir: Path | None = Field(
        default=None,
        description="Folder in which every worker writes its part of a profile, on its own host. "
        "Operators start one by POST /start_profile or `tandem profile`. Default: profiles are "
        "refused.",
    )
    torch_profiler_max_steps: int = Field(
        default=100, ge=1, description="Steps after which a profile ends by itself at the latest."
    )
    torch_profiler_max_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds after which a profile ends by itself at the latest.",
    )

    crash_report_dir: Path | None = Field(
        default=None,
        description="Folder for a report of each death of the engine: its last steps, its requests "
        "by hash and length, blocks, transfers, settings and the stacks of its processes, and "
        "nothing of what was asked or answered. The newest 16 are kept. Default: none is written.",
    )

    enable_mfu_metrics: bool = Field(
        default=False,
        description="Count the FLOPs and bytes of each step by the model's own cost, and tell how "
        "much of the GPU's FLOP/s and bandwidth prefill, decode and mixed steps use.",
    )
    device_peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="With --enable-mfu-metrics: dense TFLOP/s of one GPU in the type in which it "
        "computes. Default: known for the GPU's name, else there is no gauge.",
    )
    device_peak_gbps: float | None = Field(
        default=None,
        gt=0,
        description="With --enable-mfu-metrics: memory bandwidth of one GPU in GB/s. Default: "
        "known for the GPU's name, else there is no gauge.",
    )

    def inspection_config(self) -> InspectionConfig:
        return InspectionConfig(
            kv_cache_metrics_sample=self.kv_cache_metrics_sample if self.kv_cache_metrics else 0.0,
            torch_profiler_dir=str(self.torch_profiler_dir) if self.torch_profiler_dir else None,
            crash_report_dir=str(self.crash_report_dir) if self.crash_report_dir else None,
            enable_mfu_metrics=self.enable_mfu_metrics,
            device_peak_tflops=self.device_peak_tflops,
            device_peak_gbps=self.device_peak_gbps,
            torch_profiler_max_steps=self.torch_profiler_max_steps,
            torch_profiler_max_s=self.torch_profiler_max_s,
        )
