"""Puts the router together: `create_app(settings)` is the ASGI application.

1. built      nothing runs and nothing is connected
2. start-up   node lists are resolved, every member is watched
3. serving
4. draining   `/ready` says no; soon the server takes no new connections (`router.server`)
5. shut down  watches and connections are closed
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from edge.http.error_forms import ErrorForms
from edge.http.outer_edge import OuterEdge
from edge.http.service_routes import service_routes
from edge.http.unknown_path import serve
from edge.logs.request_log import RequestLog
from edge.security.config import Role
from edge.security.credentials import Credentials
from edge.security.metrics import CredentialsCollector
from edge.tracing.metrics import TracerCollector
from edge.tracing.tracer import Tracer
from router.admission.admission_gate import AdmissionGate, GateLimits
from router.admission.gate_metrics import GateCollector
from router.admission.model_gates import ModelGates
from router.config import RouterSettings
from router.edge.admin_api import probe_routes, readiness
from router.edge.api import ProxyEndpoint, model_routes
from router.edge.api_keys import ApiKeyCheck, ApiKeyGate, ApiKeys
from router.edge.error_answers import add_error_answers
from router.edge.no_batches import no_batch_routes
from router.edge.operator_routes import OperatorParts, operator_routes
from router.make_adapters import make_adapters
from router.make_batches import BatchParts, KeptBatches, make_batches
from router.make_discovery import make_discovery
from router.make_forwarder import make_forwarder, make_policy
from router.make_responses import KEPT_PATHS, KeptRoutes, make_responses
from router.make_scaling import make_scaling
from router.models.known_models import KnownModels
from router.models.models_catalog import ModelCatalog
from router.models.models_metrics import ModelsCollector
from router.models.open_request_limit import OpenRequestLimit
from router.models.per_model import PerModel
from router.models.rules_file import RulesFile
from router.nodes.adapter_sync import AdapterSync
from router.nodes.discovery import Discovery, Resolver, resolve_host
from router.nodes.health import EjectionPolicy
from router.nodes.load_monitor import LoadMonitor
from router.nodes.node import Patience
from router.nodes.node_get import NodeGet
from router.nodes.prefix_caches import PrefixCaches
from router.nodes.registry import NodeRegistry
from router.nodes.transport import HttpTransport, Transport
from router.observe.metrics import RouterMetrics
from router.observe.status.recent_requests import RecentRequests
from router.observe.status.snapshot import StatusSources
from router.observe.status.status_feed import StatusFeed
from router.observe.store_metrics import StoreMetrics
from router.placement.spare_nodes import SpareNodes
from router.relay.attempts import Attempts
from router.relay.forward import Forwarder
from router.relay.known_labels import start_at_zero
from router.relay.retry_budget import RetryBudget
from router.relay.silence_watch import SilenceWatch
from router.request.proxied_path import PROXIED_PATHS
from router.request.tenants import ANYONE, Tenant
from router.scaling.scaling_metrics import ScalingCollector
from router.scaling.scaling_signal import ScalingSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterWorld:
    """Holds where the router touches what is not the router. `transport` None means real HTTP."""

    transport: Transport | None = None
    resolve: Resolver = resolve_host
    rng: random.Random = field(default_factory=random.Random)


@dataclass(slots=True, kw_only=True)
class Services:
    """Holds the parts of one router, at `app.state.services`."""

    registry: NodeRegistry
    metrics: RouterMetrics
    transport: Transport
    monitor: LoadMonitor
    discovery: Discovery
    silence: SilenceWatch
    forwarder: Forwarder
    gates: ModelGates
    models: KnownModels
    keys: ApiKeys
    recent: RecentRequests
    credentials: Credentials
    caches: PrefixCaches
    adapters: AdapterSync
    tracer: Tracer
    spare: SpareNodes
    draining: bool = False
    sources: StatusSources = field(init=False)
    feed: StatusFeed = field(init=False)

    def __post_init__(self) -> None:
        self.sources = StatusSources(
            state=lambda: readiness(self.registry, self.draining),
            tenants=self.tenant_names,
            registry=self.registry,
            gates=self.known_gates,
            versions=lambda: self.models.table.versions(),
            metrics=self.metrics,
            recent=self.recent,
        )
        self.feed = StatusFeed(self.sources.snapshot)

    def for_operators(self) -> OperatorParts:
        """Returns what `operator_routes` takes."""
        adapters = self.adapters.adapters
        return self.registry, self.credentials, self.metrics, self.caches, adapters, self.feed

    def known_gates(self) -> dict[str, AdmissionGate]:
        """Returns the gates of models that exist and were asked for, by model."""
        found = {model: self.gates.known(model) for model in sorted(self.models.table.models())}
        return {model: gate for model, gate in found.items() if gate is not None}

    def tenant_names(self) -> set[str]:
        return set(self.tenants_by_name())

    def tenants_by_name(self) -> dict[str, Tenant]:
        return {tenant.name: tenant for tenant in self.keys.tenants | {ANYONE}}


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
    open_paths = {"/health", "/ready", "/ping"}
    if settings.admin_port is None:
        # A key of the API is a client's.
        routes = operator_routes(*services.for_operators(), services.keys.may_change_nodes)
        serve(app, routes, is_named=False)
        open_paths.add("/metrics")
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


def make_services(settings: RouterSettings, world: OuterWorld) -> Services:
    credentials = Credentials(settings.security_config())
    registry = _make_registry(settings)
    keys = ApiKeys(settings.api_keys.get_secret_value(), settings.api_key_file)
    models = KnownModels(registry=registry, rules=RulesFile(settings.model_rules_file))
    metrics = RouterMetrics(
        registry,
        lambda: {tenant.name for tenant in keys.tenants} | {ANYONE.name},
        lambda: models.table.versions(),
    )
    start_at_zero(metrics)
    monitor = LoadMonitor(registry, metrics, settings.watch_interval_s, credentials, world.rng)
    transport = world.transport or _make_transport(settings, credentials)
    silence = _make_silence_watch(settings, registry)
    policy = make_policy(settings, registry, world.rng)
    scaling = make_scaling(settings, registry)
    attempts = Attempts(
        policy=policy,
        registry=registry,
        transport=transport,
        metrics=metrics,
        budgets=PerModel(lambda model: RetryBudget(settings.retry_budget, settings.retry_burst)),
        scaling=scaling,
        silence=silence,
        max_attempts=settings.max_attempts,
        node_api_key=settings.node_api_key.get_secret_value(),
        wants_journal=settings.max_migrations > 0,
    )
    gates = _make_gates(settings, models, world.rng, scaling)
    metrics.registry.register(GateCollector(gates, lambda: models.table.models()))
    metrics.registry.register(ScalingCollector(scaling, lambda: models.table.models()))
    for collector in (models.rules, ModelsCollector(models), CredentialsCollector(credentials)):
        metrics.registry.register(collector)
    tracer = Tracer.open(settings, "tandem-router", socket.gethostname())
    metrics.registry.register(TracerCollector(tracer))
    return Services(
        registry=registry,
        keys=keys,
        credentials=credentials,
        caches=PrefixCaches(registry=registry, credentials=credentials, forget=policy.forget),
        adapters=make_adapters(registry, credentials, metrics.registry),
        recent=RecentRequests(),
        metrics=metrics,
        transport=transport,
        monitor=monitor,
        discovery=make_discovery(
            settings,
            on_members=monitor.set_members,
            is_alive=registry.is_connected,
            on_failure=metrics.discovery_failures.inc,
            resolve=world.resolve,
            rng=world.rng,
        ),
        silence=silence,
        forwarder=make_forwarder(settings, attempts, world.rng),
        gates=gates,
        models=models,
        tracer=tracer,
        spare=policy.spare,
    )


def _make_silence_watch(settings: RouterSettings, registry: NodeRegistry) -> SilenceWatch:
    return SilenceWatch(
        registry=registry,
        stall_s=settings.stream_stall_s,
        progress_s=settings.read_timeout_s,
        answer_s=settings.answer_timeout_s,
    )


def _make_transport(settings: RouterSettings, credentials: Credentials) -> HttpTransport:
    return HttpTransport(
        settings.connect_timeout_s,
        settings.read_timeout_s,
        settings.upstream_keepalive_s,
        credentials,
    )


def _make_gates(
    settings: RouterSettings,
    models: KnownModels,
    rng: random.Random,
    scaling: PerModel[ScalingSignal],
) -> ModelGates:
    limits = GateLimits(
        slots_per_node=settings.max_prefills_per_node,
        max_waiting=settings.max_waiting_requests,
        wait_s=settings.max_wait_s,
        num_routers=settings.num_routers,
    )
    clock = models.registry.clock
    return ModelGates(
        limits=limits,
        num_nodes=models.num_computing,
        clock=clock,
        rng=rng,
        on_request=lambda request: scaling.of(request.model).arrived(request),
    )


def _make_registry(settings: RouterSettings) -> NodeRegistry:
    return NodeRegistry(
        patience=Patience(
            stale_after_s=settings.stale_after_s,
            down_after_s=settings.down_after_s,
            stall_after_s=settings.stall_after_s,
        ),
        ejection=EjectionPolicy(
            failures=settings.ejection_failures,
            base_s=settings.ejection_base_s,
            max_s=settings.ejection_max_s,
            max_fraction=settings.ejection_max_fraction,
        ),
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, services.tracer.close)
        stack.enter_context(services.metrics.lateness.watch())
        await services.transport.open()
        stack.push_async_callback(services.transport.close)
        stack.push_async_callback(services.monitor.close)
        for work in (
            services.discovery.run(),
            services.silence.run(),
            services.forwarder.clients.run(),
            services.keys.watch(),
            services.models.rules.watch(),
            services.sources.run(),
            services.adapters.run(),
        ):
            stack.push_async_callback(_stop, asyncio.create_task(work))
        for kept in (getattr(app.state, name, None) for name in ("kept", "batches")):
            if kept is not None:
                await stack.enter_async_context(kept.running())
        yield


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
