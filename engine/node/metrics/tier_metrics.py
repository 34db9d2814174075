"""Shows the tiers in which KV of prompts is looked for: cache (`gpu`), host memory, disk, store.

A tier is asked for what the one before it lacks, so what a tier misses is what a later one gives,
or what is pulled or computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.config import EngineConfig
from engine.contracts.outputs import SchedulerStats
from kv_transfer.tier import Tier

_COUNTERS = {
    "hit_tokens": "Prompt tokens whose KV was found there.",
    "miss_tokens": "Prompt tokens whose KV was not there.",
    "evicted_blocks": "Blocks that had to go for others.",
    "residency_seconds": "Time for which evicted blocks had been there, summed.",
}


def tier_metrics(
    config: EngineConfig, stats: SchedulerStats, labels: tuple[str, ...], values: Sequence[str]
) -> Iterable[Metric]:
    """Yields nothing for an engine that has only its cache."""
    transfer, layout = config.kv_transfer, config.kv_layout
    if transfer is None or not transfer.host_tier_bytes:
        return
    tiers = [Tier.GPU, Tier.HOST, *([Tier.DISK] if transfer.disk_tier_bytes else [])]
    asked = [*tiers, *([Tier.STORE] if transfer.store_tier_url else [])]
    names, by_name = (*labels, "tier"), _counted(stats)
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(f"tandem_kv_tier_{name}", text, labels=names)
        for tier in asked:
            if tier in by_name[name]:
                counter.add_metric((*values, tier), by_name[name][tier])
        yield counter
    num_groups = config.parallel.data_parallel_size
    used = {
        Tier.GPU: stats.num_total_blocks - stats.num_free_blocks,
        Tier.HOST: stats.kv_transfer.get("host_tier_blocks", 0.0),
        Tier.DISK: stats.kv_transfer.get("disk_tier_blocks", 0.0),
    }
    # Blocks reach the disk by way of host memory.
    no_host = stats.kv_transfer.get("host_tier_off", 0.0)
    no_disk = max(no_host, stats.kv_transfer.get("disk_tier_off", 0.0))
    most = {
        Tier.GPU: stats.num_total_blocks,
        Tier.HOST: transfer.num_host_slots(layout.block_bytes) * (1 - no_host / num_groups),
        Tier.DISK: transfer.num_disk_blocks(layout.block_bytes) * (1 - no_disk / num_groups),
    }
    for name, text, blocks in (
        ("used_bytes", "KV of each rank that is there now; of groups, the mean.", used),
        ("size_bytes", "KV of each rank for which there is room.", most),
    ):
        gauge = GaugeMetricFamily(f"tandem_kv_tier_{name}", text, labels=names)
        for tier in tiers:
            share = 1 if blocks is most and tier is not Tier.GPU else num_groups
            gauge.add_metric((*values, tier), blocks[tier] / share * layout.block_bytes)
        yield gauge


def _counted(stats: SchedulerStats) -> dict[str, dict[Tier, float]]:
    """Returns what `_COUNTERS` counts, by tier."""
    counters, from_disk = stats.kv_transfer, stats.prompt_tokens_from_disk
    from_store = stats.prompt_tokens_from_store
    elsewhere = stats.prompt_tokens_computed + stats.prompt_tokens_pulled
    return {
        "hit_tokens": {
            Tier.GPU: stats.prompt_tokens_cached - stats.prompt_tokens_loaded,
            Tier.HOST: stats.prompt_tokens_from_host,
            Tier.DISK: from_disk,
            Tier.STORE: from_store,
        },
        "miss_tokens": {
            Tier.GPU: elsewhere + stats.prompt_tokens_loaded,
            Tier.HOST: elsewhere + from_disk + from_store,
            Tier.DISK: elsewhere + from_store,
            Tier.STORE: elsewhere,
        },
        "evicted_blocks": {
            Tier.GPU: stats.num_evicted_blocks,
            Tier.HOST: counters.get("host_tier_displaced_blocks", 0.0),
            Tier.DISK: counters.get("disk_tier_evicted_blocks", 0.0),
        },
        "residency_seconds": {
            Tier.HOST: counters.get("host_tier_residency_seconds", 0.0),
            Tier.DISK: counters.get("disk_tier_residency_seconds", 0.0),
        },
    }
