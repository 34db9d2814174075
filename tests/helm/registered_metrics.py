"""Names of the series that the services expose, from their own registries."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from decode_node.metrics import DecodeMetrics
from edge.security.metrics import CredentialsCollector
from engine.config import DeviceConfig, ParallelConfig
from engine.contracts.outputs import ExpertStats, ResidencyStats, SchedulerStats, WorkStats
from engine.inspection_config import InspectionConfig
from engine.lora import LoRAConfig
from engine.node.metrics.engine_metrics import EngineCollector
from engine.node.metrics.kv_transfer_metrics import BY_TRANSPORT
from kv_transfer.config import KVTransferConfig
from kv_transfer.control.scheduler import GrpcConnectorScheduler
from kv_transfer.metadata import Reclaim
from kv_transfer.tiers.host_tier import PooledHostTier
from prefill_node.metrics import PrefillMetrics
from router.config import RouterSettings
from router.make_services import OuterWorld, make_services


@cache
def registry_of(component: str) -> CollectorRegistry:
    """Returns what a router, a prefill node or a decode node counts."""
    if component == "router":
        return make_services(RouterSettings(), OuterWorld()).metrics.registry
    if component == "prefill":
        return _node_registry(PrefillMetrics(measured_engine().config).registry)
    metrics = DecodeMetrics(measured_engine().config)
    metrics.watch_proxy(SimpleNamespace(open=SimpleNamespace(count=0), num_remote=0, num_queued=0, num_free_blocks=0))  # type: ignore[arg-type]  # fmt: skip  # noqa: E501
    return _node_registry(metrics.registry)


@cache
def series_of(component: str) -> frozenset[str]:
    return frozenset(_series(generate_latest(registry_of(component)).decode()))


@cache
def labels_of(component: str) -> dict[str, frozenset[str]]:
    """Maps each family to the labels of its series."""
    found: dict[str, frozenset[str]] = {}
    for collector in list(registry_of(component)._collector_to_names):
        for family in collector.collect():
            of = collector if hasattr(collector, "_labelnames") else family
            used = {label for sample in family.samples for label in sample.labels}
            found[family.name] = frozenset(used | set(getattr(of, "_labelnames", ())))
    return found


def _node_registry(registry: CollectorRegistry) -> CollectorRegistry:
    registry.register(EngineCollector(measured_engine()))
    credentials: Any = SimpleNamespace(
        certificate_expires_at=lambda: None,
        plaintext_connections={"http": 0},
        config=SimpleNamespace(accept_missing_token=True),
        num_missing_tokens=0,
    )
    registry.register(CredentialsCollector(credentials))
    return registry


def measured_engine() -> Any:
    """Builds as much of an engine as its metrics ask for."""
    counters = dict.fromkeys(transfer_figures(), 0.0)
    return SimpleNamespace(
        adapters=SimpleNamespace(known={}),
        config=SimpleNamespace(
            model=SimpleNamespace(served_model_name="m", quantization=None),
            cache=SimpleNamespace(block_size=16),
            decode_query_len=4,
            lora=LoRAConfig(),
            inspection=InspectionConfig(
                enable_mfu_metrics=True, device_peak_tflops=1.0, device_peak_gbps=1.0
            ),
            device=DeviceConfig(),
            parallel=ParallelConfig(data_parallel_size=2),
            kv_layout=SimpleNamespace(block_bytes=1),
            kv_transfer=KVTransferConfig(
                kv_role="kv_producer", host_tier_bytes=1, disk_tier_bytes=1
            ),
        ),
        stats=SchedulerStats(
            kv_transfer=counters,
            residency=ResidencyStats(),
            work=WorkStats(),
            experts=ExpertStats(),
        ),
        ready=SimpleNamespace(num_blocks=1, device_name=""),
        is_dead=False,
    )


def transfer_figures() -> set[str]:
    """Reads the names of counters. The connector needs processes to be made, so its names are read
    from its source.
    """
    getter = GrpcConnectorScheduler.counters.fget
    found = set(re.findall(r'"(\w+)":', inspect.getsource(getter)))
    of_tiers = PooledHostTier(0, 0, lambda process, command: True).counters
    return found | {f"reclaimed_{why}" for why in Reclaim} | BY_TRANSPORT.keys() | of_tiers.keys()


def _series(text: str) -> Iterator[str]:
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        if kind == "histogram":
            yield from (f"{name}_bucket", f"{name}_sum", f"{name}_count")
        else:
            yield name
