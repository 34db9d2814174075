"""Makes the parts of one router that its application serves."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from edge.security.credentials import Credentials
from edge.security.metrics import CredentialsCollector
from edge.tracing.metrics import TracerCollector
from edge.tracing.tracer import Tracer
from router.admission.admission_gate import AdmissionGate, GateLimits
from router.admission.gate_metrics import GateCollector
from router.admission.model_gates import ModelGates
from router.config import RouterSettings
from router.edge.api_keys import ApiKeys
from router.edge.operators.admin_api import readiness
from router.edge.operators.operator_routes import OperatorParts
from router.make_discovery import make_discovery
from router.make_forwarder import make_forwarder, make_policy
from router.make_scaling import make_scaling
from router.models.known_models import KnownModels
from router.models.models_metrics import ModelsCollector
from router.models.per_model import PerModel
from router.models.rules_file import RulesFile
from router.nodes.adapters.adapter_asker import AdapterAsker
from router.nodes.adapters.adapter_sync import AdapterSync
from router.nodes.adapters.adapters import ClusterAdapters
from router.nodes.discovery import Discovery, Resolver, resolve_host
from router.nodes.health import EjectionPolicy
from router.nodes.http.transport import HttpTransport, Transport
from router.nodes.load_monitor import LoadMonitor
from router.nodes.node import Patience
from router.nodes.operations.aborts import Aborts
from router.nodes.operations.prefix_caches import PrefixCaches
from router.nodes.registry import NodeRegistry
from router.observe.adapter_metrics import AdaptersCollector
from router.observe.metrics import RouterMetrics
from router.observe.status.recent_requests import RecentRequests
from router.observe.status.snapshot import StatusSources
from router.observe.status.status_feed import StatusFeed
from router.placement.candidates.spare_nodes import SpareNodes
from router.relay.attempts.attempts import Attempts
from router.relay.attempts.retry_budget import RetryBudget
from router.relay.attempts.silence_watch import SilenceWatch
from router.relay.forward import Forwarder
from router.relay.known_labels import start_at_zero
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
    aborts: Aborts
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
        parts = self.registry, self.credentials, self.metrics, self.caches, self.aborts
        return *parts, self.adapters.adapters, self.feed

    def known_gates(self) -> dict[str, AdmissionGate]:
        """Returns the gates of models that exist and were asked for, by model."""
        found = {model: self.gates.known(model) for model in sorted(self.models.table.models())}
        return {model: gate for model, gate in found.items() if gate is not None}

    def tenant_names(self) -> set[str]:
        return set(self.tenants_by_name())

    def tenants_by_name(self) -> dict[str, Tenant]:
        return {tenant.name: tenant for tenant in self.keys.tenants | {ANYONE}}


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
    recent = RecentRequests()
    aborts = Aborts(registry=registry, credentials=credentials, open_requests=recent.all_open)
    interval_s = settings.watch_interval_s
    monitor = LoadMonitor(registry, metrics, interval_s, credentials, aborts.follow, world.rng)
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
    tracer = Tracer.open(settings, "tandem-router", socket.gethostname())
    _register(metrics.registry, models, gates, scaling, credentials, tracer)
    return Services(
        registry=registry,
        keys=keys,
        credentials=credentials,
        caches=PrefixCaches(registry=registry, credentials=credentials, forget=policy.forget),
        adapters=_make_adapters(registry, credentials, metrics.registry),
        recent=recent,
        aborts=aborts,
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
        forwarder=make_forwarder(settings, attempts, policy.pool, world.rng),
        gates=gates,
        models=models,
        tracer=tracer,
        spare=policy.spare,
    )


def _register(
    registry: CollectorRegistry,
    models: KnownModels,
    gates: ModelGates,
    scaling: PerModel[ScalingSignal],
    credentials: Credentials,
    tracer: Tracer,
) -> None:
    def known() -> set[str]:
        return models.table.models()

    for collector in (
        GateCollector(gates, known),
        ScalingCollector(scaling, known),
        models.rules,
        ModelsCollector(models),
        CredentialsCollector(credentials),
        TracerCollector(tracer),
    ):
        registry.register(collector)


def _make_adapters(
    registry: NodeRegistry, credentials: Credentials, metrics: CollectorRegistry
) -> AdapterSync:
    """Returns what loads adapters on nodes; `metrics` shows how far nodes are behind."""
    sync = AdapterSync(adapters=ClusterAdapters(registry=registry, asker=AdapterAsker(credentials)))
    metrics.register(AdaptersCollector(sync))
    return sync


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
