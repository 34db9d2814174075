"""Reads what nodes tell on /metrics, and which of it must be zero when nothing asks anything of
them.

Tests of whole clusters and `bench.serving.soak` go by the same list.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

ZERO_WHEN_EMPTY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "tandem_requests_waiting_for_remote_kvs",
    "tandem_delayed_frees",
    "tandem_kv_transfer_live_transfers",
    "tandem_kv_transfer_process_transfers",
    "tandem_kv_transfer_staged_bytes",
    "tandem_kv_transfer_leases",
    "tandem_kv_transfer_open_pulls",
    "tandem_open_requests",
    "tandem_open_prefills",
    "tandem_remote_prefills",
    "tandem_credit_waiters",
)
"""Some of them only one of the tiers has."""


async def samples(session: aiohttp.ClientSession, url: str) -> list[Sample]:
    """Returns all that a node tells. Raises `aiohttp.ClientError` where nothing answers, and where
    a node that is starting answers 503."""
    async with session.get(url) as response:
        response.raise_for_status()
        families = text_string_to_metric_families(await response.text())
        return [sample for family in families for sample in family.samples]


async def read_metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Maps name to value, summed over labels. Raises as `samples` does."""
    values: defaultdict[str, float] = defaultdict(float)
    for sample in await samples(session, url):
        values[sample.name] += sample.value
    return dict(values)


async def by_label(
    session: aiohttp.ClientSession, url: str, name: str, label: str
) -> dict[str, float]:
    """Maps a label's values to the sum of the metric's. Raises as `samples` does."""
    values: defaultdict[str, float] = defaultdict(float)
    for sample in await samples(session, url):
        if sample.name == name and label in sample.labels:
            values[sample.labels[label]] += sample.value
    return dict(values)


def histogram_quantile(
    before: Mapping[str, float], after: Mapping[str, float], part: float
) -> float | None:
    """Returns the value below which `part` of what a histogram counted in between lies, with linear
    interpolation as in Prometheus; buckets by their upper bound. None: nothing was counted."""
    buckets = sorted((float(le), count - before.get(le, 0.0)) for le, count in after.items())
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted = part * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (wanted - below) / max(count - below, 1e-12)
        low, below = bound, count
    return low


def held(values: Mapping[str, float]) -> dict[str, float]:
    """Returns what a node has not given back, by name; empty when all of it. Raises `KeyError` for
    metrics that are not a node's.
    """
    found = {name: values[name] for name in ZERO_WHEN_EMPTY if values.get(name)}
    taken = values["tandem_kv_blocks"] - values["tandem_kv_blocks_free"]
    return found | ({"blocks": taken} if taken else {})
