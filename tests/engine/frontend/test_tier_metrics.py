"""Hits and misses by tier: a tier is asked for what the one before it lacks."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from engine.contracts.outputs import SchedulerStats
from engine.node.metrics.tier_metrics import tier_metrics
from kv_transfer.config import KVTransferConfig
from tests.engine.core.tiny_engine import tiny_config

CONFIG = tiny_config()
BLOCK = CONFIG.kv_layout.block_bytes
STATS = SchedulerStats(
    num_total_blocks=10,
    num_free_blocks=4,
    prompt_tokens_computed=100,
    prompt_tokens_cached=90,
    prompt_tokens_loaded=50,
    prompt_tokens_from_disk=20,
    prompt_tokens_pulled=7,
    num_evicted_blocks=3,
    kv_transfer={
        "host_tier_blocks": 5.0,
        "host_tier_displaced_blocks": 4.0,
        "host_tier_residency_seconds": 12.5,
        "disk_tier_blocks": 9.0,
        "disk_tier_evicted_blocks": 2.0,
        "disk_tier_residency_seconds": 60.0,
    },
)


def figures(stats: SchedulerStats = STATS, **transfer: int) -> dict[str, dict[str, float]]:
    config = replace(CONFIG, kv_transfer=KVTransferConfig(kv_role="kv_producer", **transfer))
    return {
        metric.name.removeprefix("tandem_kv_tier_"): {
            sample.labels["tier"]: sample.value for sample in metric.samples
        }
        for metric in tier_metrics(config, stats, ("model_name",), ("m",))
    }


def test_every_token_is_a_hit_of_one_tier_or_a_miss_of_all() -> None:
    found = figures(host_tier_bytes=8 * BLOCK, disk_tier_bytes=20 * BLOCK)
    assert found["hit_tokens"] == {"gpu": 40, "host": 30, "disk": 20}
    assert found["miss_tokens"] == {"gpu": 157, "host": 127, "disk": 107}
    assert found["evicted_blocks"] == {"gpu": 3, "host": 4, "disk": 2}
    assert found["residency_seconds"] == {"host": 12.5, "disk": 60}
    assert found["used_bytes"] == {"gpu": 6 * BLOCK, "host": 5 * BLOCK, "disk": 9 * BLOCK}
    assert found["size_bytes"] == {"gpu": 10 * BLOCK, "host": 8 * BLOCK, "disk": 20 * BLOCK}


@pytest.mark.parametrize(
    ("off", "host", "disk"), [("disk_tier_off", 8, 0), ("host_tier_off", 0, 0), ("other", 8, 20)]
)
def test_a_tier_that_is_off_has_no_room(off: str, host: int, disk: int) -> None:
    stats = msgspec.structs.replace(STATS, kv_transfer={**STATS.kv_transfer, off: 1.0})
    found = figures(stats, host_tier_bytes=8 * BLOCK, disk_tier_bytes=20 * BLOCK)["size_bytes"]
    assert found == {"gpu": 10 * BLOCK, "host": host * BLOCK, "disk": disk * BLOCK}


def test_tiers_that_are_not_there_have_no_series() -> None:
    assert figures() == {}
    assert figures(host_tier_bytes=8 * BLOCK)["hit_tokens"].keys() == {"gpu", "host"}
