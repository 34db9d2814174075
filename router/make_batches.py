"""Puts together what keeps files and answers batches. Its libraries are imported only where batches
are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from router.config import RouterSettings
from router.errors import ConfigurationError
from router.models.known_models import ModelTable
from router.observe.batch_metrics import BatchCollector, BatchTotals
from router.observe.store_metrics import StoreMetrics
from router.placement.candidates.spare_nodes import SpareNodes
from router.request.tenants import Tenant
from router.store.running_tasks import running_tasks

if TYPE_CHECKING:
    from router.batches.runs.batch_runs import BatchRuns

_MIB = 1 << 20
_LINE_SLACK = 1 << 16
"""Bytes of a line besides the body in it."""


@dataclass(frozen=True, slots=True)
class KeptBatches:
    """Serves batches. `running` is open while the router serves; `runs` works on those here."""

    routes: Sequence[BaseRoute]
    running: Callable[[], AbstractAsyncContextManager[None]]
    runs: BatchRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """Are the parts of a router that batches need. `tenants` gives those that exist."""

    api: ASGIApp
    spare: SpareNodes
    tenants: Callable[[], Mapping[str, Tenant]]
    table: Callable[[], ModelTable]
    registry: CollectorRegistry
    store: StoreMetrics


def make_batches(settings: RouterSettings, parts: BatchParts) -> KeptBatches:
    """Returns what serves batches. Raises `ConfigurationError` where the store cannot be used."""
    try:
        from router.batches.batch_calls import BatchCalls
        from router.batches.batch_store import BatchStore
        from router.batches.expiry import sweep_batches
        from router.batches.files.file_calls import FileCalls
        from router.batches.runs.answer import Answering
        from router.batches.runs.batch_runs import BatchRuns
        from router.batches.runs.idle_room import IdleRoom
        from router.batches.settings import BatchLimits
        from router.edge.batch_api import BatchRoutes
        from router.store.sql.database import Database, Purpose
        from router.store.sweeping import sweep_forever
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--batch-store needs the package {error.name}: pip install 'tandem[state]'"
        ) from None
    limits = BatchLimits(
        max_file_bytes=settings.batch_max_file_mib * _MIB,
        max_line_bytes=settings.max_body_bytes + _LINE_SLACK,
        max_requests=settings.batch_max_requests,
        max_bytes_per_tenant=settings.batch_store_mib_per_tenant * _MIB,
        max_batches_per_tenant=settings.batch_max_per_tenant,
        ttl_s=settings.batch_ttl_s,
        lease_s=settings.batch_lease_s,
        max_concurrent=settings.batch_max_concurrent_requests,
    )
    purpose = Purpose("--batch-store", "files and batches", "batch_store_unavailable", "")
    url = settings.batch_store.get_secret_value()
    timeout_s = settings.batch_store_timeout_s
    database = Database(url, timeout_s, parts.store.observe, purpose)
    store = BatchStore(database, limits, clock=database.clock)
    room = IdleRoom(parts.spare, limits.max_concurrent)
    totals = BatchTotals()
    runs = BatchRuns(
        store=store,
        answering=Answering(parts.api, totals),
        room=room,
        tenants=parts.tenants,
        table=parts.table,
    )
    parts.registry.register(BatchCollector(totals, runs.facts, lambda: room.num_running))
    routes = BatchRoutes(
        files=FileCalls(store),
        batches=BatchCalls(store, runs.wake),
        body_limits=settings.body_limits(),
    )

    def running() -> AbstractAsyncContextManager[None]:
        sweeping = sweep_forever(store.database, partial(sweep_batches, store))
        works = room.run(), runs.watch(), sweeping
        return running_tasks(store.database, *works, close=runs.close)

    return KeptBatches(routes.routes(), running, runs)
