"""Tests what a node with data-parallel groups tells of each."""

from __future__ import annotations

from dataclasses import replace

from engine.config import ParallelConfig
from engine.contracts.outputs import DraftStats, LoRAStats, SchedulerStats
from engine.node.metrics.group_metrics import group_metrics
from engine.node.metrics.tier_metrics import tier_metrics
from engine.sched.groups.merged_stats import merged_stats
from kv_transfer.config import KVTransferConfig
from tests.engine.sched.factories import make_config


def stats_of(scale: int) -> SchedulerStats:
    return SchedulerStats(
        num_running=scale,
        num_waiting=2 * scale,
        num_waiting_tokens=3 * scale,
        num_free_blocks=4 * scale,
        num_total_blocks=100,
        prompt_tokens_cached=5 * scale,
        prompt_tokens_computed=6 * scale,
        last_step_at=float(scale),
        drafts=DraftStats(num_accepted_per_pos=[scale] * scale),
        lora=LoRAStats(running=[f"a{scale}"], loaded=["both", f"a{scale}"]),
        kv_transfer={"host_tier_blocks": 8.0 * scale},
    )


def test_statistics_of_groups_are_one_engines_and_each_ones() -> None:
    found = merged_stats([stats_of(1), stats_of(2)])
    assert (found.num_running, found.num_waiting_tokens, found.last_step_at) == (3, 9, 2.0)
    assert found.drafts.num_accepted_per_pos == [3, 2]
    assert found.lora == LoRAStats(["a1", "a2"], [], ["a1", "a2", "both"])
    samples = {
        (metric.name, sample.labels["group"]): sample.value
        for metric in group_metrics(found.groups, ("model_name",), ("m",))
        for sample in metric.samples
    }
    assert samples["tandem_group_running_requests", "1"] == 2
    assert samples["tandem_group_waiting_tokens", "0"] == 3
    assert samples["tandem_group_free_blocks", "1"] == 8
    assert samples["tandem_group_prompt_tokens_cached", "1"] == 10
    assert len(samples) == 12
    assert list(group_metrics(stats_of(1).groups, ("model_name",), ("m",))) == []


def test_tiers_of_groups_never_seem_larger_than_they_are() -> None:
    transfer = KVTransferConfig(kv_role="kv_producer", host_tier_bytes=1 << 20)
    config = replace(
        make_config(kv_transfer=transfer), parallel=ParallelConfig(data_parallel_size=2)
    )
    samples = {
        (sample.name, sample.labels["tier"]): sample.value
        for metric in tier_metrics(config, merged_stats([stats_of(1), stats_of(3)]), ("m",), ("m",))
        for sample in metric.samples
    }
    block = config.kv_layout.block_bytes
    assert samples["tandem_kv_tier_size_bytes", "gpu"] == 100 * block
    assert samples["tandem_kv_tier_used_bytes", "gpu"] == (100 - 8) * block
    assert samples["tandem_kv_tier_used_bytes", "host"] == 16 * block
    assert samples["tandem_kv_tier_size_bytes", "host"] == (1 << 20) // block * block
