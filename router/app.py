"""Puts the router together: `create_app(settings)` is the ASGI application.

1. built      nothing runs and nothing is connected
2. start-up   node lists are resolved, every member is watched
3. serving
4. draining   `/ready` says no; soon the server takes no new connections (`router.server`)
5. shut down  watches and connections are closed
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from edge.http.error_forms import ErrorForms
from edge.http.event_loop.lasting_task import start_lasting
from edge.http.outer_edge import OuterEdge
from edge.http.request_head import READY_PATHS
from edge.http.service_routes import service_routes
from edge.http.unknown_path import serve, serve_elsewhere
from edge.logs.request_log import RequestLog
from edge.security.config import Role
from router.config import RouterSettings
from router.edge.api import ProxyEndpoint, model_routes
from router.edge.api_keys import ApiKeyCheck, ApiKeyGate
from router.edge.error_answers import add_error_answers
from router.edge.not_kept import no_batch_routes, no_response_routes
from router.edge.operators.admin_api import probe_routes
from router.edge.operators.operator_routes import operator_routes
from router.make_batches import BatchParts, KeptBatches, make_batches
from router.make_responses import KEPT_PATHS, KeptRoutes, make_responses
from router.make_services import OuterWorld, Services, make_services
from router.models.models_catalog import ModelCatalog
from router.models.open_request_limit import OpenRequestLimit
from router.nodes.http.node_get import NodeGet
from router.observe.store_metrics import StoreMetrics
from router.request.proxied_path import PROXIED_PATHS


def create_app(settings: RouterSettings, world: OuterWorld | None = None) -> FastAPI:
    """Returns the router. Raises `ConfigurationError` when a node list is wrong, `SecurityError`
    when a certificate cannot be read, `TracingError` when traces cannot be written."""
    services = make_services(settings, world or OuterWorld())
    app = _bare_app(_lifespan)
    app.state.services = services
    endpoint = ProxyEndpoint(
        forwarder=services.forwarder,
        gates=services.gates,
        models=services.models,
        room=OpenRequestLimit(
            limit=settings.max_open_requests,
            models=lambda: services.models.table.models(),
            retry_after_s=services.gates.retry_after_s,
            max_waiting_bytes=settings.max_waiting_bytes,
        ),
        metrics=services.metrics,
        recent=services.recent,
        body_limits=settings.body_limits(),
        may_name_nodes=services.keys.may_name_nodes,
        tracer=services.tracer,
    )
    _serve_requests(app, settings, services, endpoint)
    catalog = ModelCatalog(
        registry=services.registry,
        models=services.models,
        get=NodeGet(transport=services.transport, api_key=settings.node_api_key.get_secret_value()),
    )
    serve(app, model_routes(catalog).routes)
    serve(
        app,
        service_routes(
            _alive,
            lambda: endpoint.room.num_open,
            catalog.document,
            settings.http_front().root_path,
        ),
    )
    serve(app, _probe_routes(services).routes)
    open_paths = {"/health", *READY_PATHS, "/ping"}
    if settings.admin_port is None:
        # A key of the API is a client's.
        routes = operator_routes(*services.for_operators(), services.keys.may_change_nodes)
        serve(app, routes, is_named=False)
        open_paths.add("/metrics")
    else:
        routes = operator_routes(*services.for_operators())
        serve_elsewhere(app, routes, where="at the router's --admin-port")
    check = app.state.key_check = ApiKeyCheck(services.keys, open_paths)
    app.add_middleware(ApiKeyGate, check=check)
    app.add_middleware(ErrorForms)
    app.add_middleware(
        OuterEdge,
        is_draining=lambda: services.draining,
        front=settings.http_front(),
        sampler=settings.sampler(),
        requests=RequestLog(is_on=settings.log_requests),
    )
    return app


def _serve_requests(
    app: FastAPI, settings: RouterSettings, services: Services, endpoint: ProxyEndpoint
) -> None:
    """Serves the paths of requests, and what is kept of them."""
    kept, batches = _make_kept(settings, services, endpoint)
    for path in PROXIED_PATHS:
        is_kept = kept is not None and path in KEPT_PATHS
        serve(app, [Route(path, kept.endpoint if kept and is_kept else endpoint, methods=["POST"])])
    if kept is not None:
        app.state.kept = kept
        serve(app, kept.routes)
    else:
        serve(app, no_response_routes(), is_named=False)
    if batches is not None:
        app.state.batches = batches
        serve(app, batches.routes)
    else:
        serve(app, no_batch_routes(), is_named=False)


def _make_kept(
    settings: RouterSettings, services: Services, api: ProxyEndpoint
) -> tuple[KeptRoutes | None, KeptBatches | None]:
    """Returns what keeps responses, and what keeps batches, where there are stores for them."""
    keeps_responses = bool(settings.response_store.get_secret_value())
    keeps_batches = bool(settings.batch_store.get_secret_value())
    if not keeps_responses and not keeps_batches:
        return None, None
    metrics = StoreMetrics(services.metrics, services.metrics.registry)
    tenants = services.tenants_by_name
    kept = batches = None
    if keeps_responses:
        kept = make_responses(settings, api, api.room, tenants, metrics)
    if keeps_batches:
        parts = BatchParts(
            api=api,
            spare=services.spare,
            tenants=tenants,
            table=lambda: services.models.table,
            registry=services.metrics.registry,
            store=metrics,
        )
        batches = make_batches(settings, parts)
        services.sources.batches = batches.runs.facts
    return kept, batches


async def _alive() -> Response:
    return Response()


def create_admin_app(services: Services) -> FastAPI:
    """Returns what serves `admin_port`. It asks for no key."""
    app = _bare_app()
    app.add_middleware(OuterEdge, is_draining=lambda: False)
    serve(app, _probe_routes(services).routes)
    serve(app, operator_routes(*services.for_operators()))
    return app


def _bare_app(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    app = FastAPI(
        title="tandem router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    add_error_answers(app)
    return app


def _probe_routes(services: Services) -> APIRouter:
    fault = services.credentials.watched_fault(Role.ROUTER)
    return probe_routes(services.registry, lambda: services.draining, fault)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, services.tracer.close)
        stack.enter_context(services.metrics.lateness.watch())
        await services.transport.open()
        stack.push_async_callback(services.transport.close)
        stack.push_async_callback(services.monitor.close)
        works = {
            "the search for nodes": services.discovery.run(),
            "the watch over answers": services.silence.run(),
            "the pulse of answers": services.forwarder.clients.run(),
            "the watch over API keys": services.keys.watch(),
            "the watch over model rules": services.models.rules.watch(),
            "the status page": services.sources.run(),
            "the watch over adapters": services.adapters.run(),
        }
        for name, work in works.items():
            stack.push_async_callback(_stop, start_lasting(work, name))
        for kept in (getattr(app.state, name, None) for name in ("kept", "batches")):
            if kept is not None:
                await stack.enter_async_context(kept.running())
        yield


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
