"""Makes the discovery that the settings describe."""

from __future__ import annotations

import random
from collections.abc import Callable

from router.config import RouterSettings
from router.kubernetes.api_client import EndpointSliceApi, KubernetesAccess
from router.kubernetes.endpoint_slices import Endpoints
from router.kubernetes.slice_watch import SliceWatch
from router.nodes.address import NodeAddress, NodeRole, parse_node_list
from router.nodes.discovery import Discovery, Resolver, Watcher


def make_discovery(
    settings: RouterSettings,
    *,
    on_members: Callable[[set[NodeAddress], set[NodeAddress]], None],
    is_alive: Callable[[NodeAddress], bool],
    on_failure: Callable[[], None],
    resolve: Resolver,
    rng: random.Random,
) -> Discovery:
    """Returns it, not running yet. Raises `ConfigurationError` when a node list is wrong."""
    entries = (
        *parse_node_list(NodeRole.PREFILL, settings.prefill),
        *parse_node_list(NodeRole.DECODE, settings.decode),
    )
    return Discovery(
        entries,
        on_members,
        is_alive,
        on_failure,
        interval_s=settings.dns_interval_s,
        linger_s=settings.dns_linger_s,
        resolve=resolve,
        watch=_service_watcher(settings, on_failure, rng),
    )


def _service_watcher(
    settings: RouterSettings, on_failure: Callable[[], None], rng: random.Random
) -> Watcher:
    access = KubernetesAccess(
        url=settings.kubernetes_url, credentials=settings.kubernetes_credentials
    )

    async def watch(service: str, on_endpoints: Callable[[Endpoints], None]) -> None:
        name, _, namespace = service.partition(".")
        api = EndpointSliceApi(access, name, namespace)
        await SliceWatch(api, service, on_endpoints, on_failure, rng).run()

    return watch
