"""Metrics of adapters, under vLLM's name where it has one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from engine.contracts.outputs import LoRAStats
from engine.contracts.request_spec import AdapterRef
from engine.lora import LoRAConfig


def adapter_metrics(
    config: LoRAConfig | None,
    stats: LoRAStats | None,
    known: Mapping[str, AdapterRef],
    labels: Sequence[str],
    values: Sequence[str],
) -> Iterable[Metric]:
    """Yields which adapters have requests, and how many there are; nothing without
    `--enable-lora`. `known`: adapters by name."""
    if config is None:
        return
    stats = stats or LoRAStats()
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters that requests run with and wait for, as of the time that is the value.",
        labels=(*labels, "max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    )
    waiting, running = (_names(known, some) for some in (stats.waiting, stats.running))
    info.add_metric((*values, str(config.max_loras), waiting, running), time.time())
    yield info
    for name, text, count in (
        ("tandem_lora_adapters", "Adapters that requests may name.", len(known)),
        ("tandem_lora_adapters_loaded", "Adapters in host memory.", len(stats.loaded)),
    ):
        gauge = GaugeMetricFamily(name, text, labels=labels)
        gauge.add_metric(values, count)
        yield gauge


def _names(known: Mapping[str, AdapterRef], digests: Sequence[str]) -> str:
    return ",".join(sorted(name for name, ref in known.items() if ref.digest in digests))
