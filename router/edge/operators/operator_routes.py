"""Lists what operators ask a router: on the API's port, or on one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from starlette.routing import BaseRoute

from edge.security.credentials import Credentials
from router.edge.operators.abort_api import abort_routes
from router.edge.operators.adapter_api import adapter_routes
from router.edge.operators.admin_api import admin_routes
from router.edge.operators.node_api import node_routes
from router.edge.operators.role_api import role_routes
from router.edge.operators.status_api import status_routes
from router.nodes.adapters.adapters import ClusterAdapters
from router.nodes.operations.aborts import Aborts
from router.nodes.operations.drains import NodeDrains
from router.nodes.operations.prefix_caches import PrefixCaches
from router.nodes.operations.role_changes import RoleChanges
from router.nodes.registry import NodeRegistry
from router.observe.metrics import RouterMetrics
from router.observe.status.status_feed import StatusFeed

OperatorParts: TypeAlias = tuple[
    NodeRegistry, Credentials, RouterMetrics, PrefixCaches, Aborts, ClusterAdapters, StatusFeed
]


def operator_routes(
    registry: NodeRegistry,
    credentials: Credentials,
    metrics: RouterMetrics,
    caches: PrefixCaches,
    aborts: Aborts,
    adapters: ClusterAdapters,
    feed: StatusFeed,
    may_change: Callable[[], bool] = lambda: True,
) -> list[BaseRoute]:
    """Returns the routes. Where `may_change` is false they only tell."""
    roles = RoleChanges(registry=registry, credentials=credentials)
    drains = NodeDrains(registry=registry, credentials=credentials)
    return [
        *admin_routes(metrics, caches, may_change).routes,
        *abort_routes(aborts, may_change).routes,
        *adapter_routes(adapters, may_change).routes,
        *role_routes(roles, may_change).routes,
        *node_routes(drains, may_change).routes,
        *status_routes(feed),
    ]
