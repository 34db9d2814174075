"""Settings of how far a node lets its engine be looked into."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from engine.config import InspectionConfig


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

    def inspection_config(self) -> InspectionConfig:
        return InspectionConfig(
            kv_cache_metrics_sample=self.kv_cache_metrics_sample if self.kv_cache_metrics else 0.0
        )
