"""Metrics that exist only where a setting asks for them."""

from __future__ import annotations

from engine.node.inspection_metrics import residency_metrics
from engine.outputs import ResidencyStats

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
