"""Puts together what loads adapters on nodes, and brings nodes up to date."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from edge.security.credentials import Credentials
from router.nodes.adapter_asker import AdapterAsker
from router.nodes.adapter_sync import AdapterSync
from router.nodes.adapters import ClusterAdapters
from router.nodes.registry import NodeRegistry
from router.observe.adapter_metrics import AdaptersCollector


def make_adapters(
    nodes: NodeRegistry, credentials: Credentials, metrics: CollectorRegistry
) -> AdapterSync:
    """Returns what asks `nodes`; `metrics` shows how far they are behind."""
    sync = AdapterSync(adapters=ClusterAdapters(registry=nodes, asker=AdapterAsker(credentials)))
    metrics.register(AdaptersCollector(sync))
    return sync
