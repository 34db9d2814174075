"""Runs a decode node.

1. ports are taken, the checkpoint read, the engine started (progress on standard output)
2. ready: one JSON line with the addresses; /ready says 200, gRPC health SERVING
3. SIGTERM: draining. /ready says 503, new requests get 503 with Retry-After, open answers
   finish; then exit code 0
-  the engine dies: open answers end with an error, /health says 503, exit code 1
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp

from decode_node.answer.sse import Liveness
from decode_node.app import create_app
from decode_node.config import DecodeNodeSettings
from decode_node.disagg.cached_prefixes import CachedPrefixes, CachedStates
from decode_node.disagg.credits import KVCredits
from decode_node.disagg.prefill_client import PrefillClient
from decode_node.disagg.proxy import DisaggProxy
from decode_node.disagg.remote_prefill import RemotePrefillLimits
from decode_node.grammar.answer_grammars import AnswerGrammars
from decode_node.grammar.checks.grammar_checker import GrammarChecker
from decode_node.grammar.checks.grammar_metrics import GrammarCollector
from decode_node.http.callers import CallerCheck, CallerKeys
from decode_node.http.ignored_fields import IgnoredFields
from decode_node.http.router_headers import prefill_nodes
from decode_node.http.routes import Api, ApiState
from decode_node.images.create_reader import create_image_reader
from decode_node.images.image_reader import ImageReader
from decode_node.metrics import DecodeMetrics
from decode_node.prefix_sharing import only_kept_answers, serve_answers
from decode_node.served_text import ServedText, chat_format, create_served_model, with_template
from decode_node.serving.model_cards import ModelCards
from decode_node.serving.openai_serving import OpenAIServing
from decode_node.serving.prepare_choices import ChoicePreparer
from decode_node.serving.read_request import RequestReader
from decode_node.serving.respond import Responder
from decode_node.serving.tokenizer_serving import TokenizerServing
from edge.address import join_address
from edge.command_line import SettingsError
from edge.http.connection.guarded_protocol import guarded_protocol
from edge.http.event_loop.lasting_task import start_lasting
from edge.http.tls_http import TlsConfig
from edge.security.config import Role
from edge.security.credentials import Credentials
from edge.security.metrics import CredentialsCollector
from edge.security.server_tls import ServerTls
from edge.tracing.metrics import TracerCollector
from edge.tracing.tracer import Tracer
from engine.config import EngineConfig
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.tokenizer import Tokenizer
from engine.kv_cache.capacity import (
    blocks_a_token,
    blocks_besides,
    tokens_that_fit,
    windows_roll,
)
from engine.kv_cache.groups import state_stride
from engine.node.grpc_server import NodeGrpcServer
from engine.node.http_server import HttpServer, ProbeServer, listen
from engine.node.lifetime import NodeLifetime
from engine.node.metrics.engine_metrics import EngineCollector
from engine.node.prefix_servicer import CALLERS as PREFIX_CALLERS
from engine.node.process import StopSignal, emit_ready, start_engine
from engine.node.services.role_switch import RoleSwitch
from engine.node.start_progress import StartProgress
from engine.node.status import NodeStatus
from tandem_pb import node_pb2

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
_STALL_MARGIN_S = 1.0
_KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than HTTP clients keep idle connections (the
router 4 s, others 5 to 15 s): if we closed first, a request that was just being sent would be lost
with the connection."""


class DecodeNode:
    """Holds everything of a running node. `run` → `close`; engine and traces belong to the caller.
    `switch`: takes the request for another role; None: it has one."""

    def __init__(
        self,
        settings: DecodeNodeSettings,
        engine: AsyncLLM,
        text: ServedText,
        ports: NodePorts,
        credentials: Credentials,
        tracer: Tracer,
        switch: RoleSwitch | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._ports = ports
        self._state = ApiState()
        self._status = NodeStatus(
            engine,
            node_pb2.NODE_ROLE_DECODE,
            settings.stuck_after_s,
            settings.frozen_after_s,
            switch,
        )
        self._status.own_fault = credentials.watched_fault(Role.DECODE)
        self._state.own_fault = self._status.own_fault
        self._client = create_prefill_client(settings, engine, credentials)
        self._proxy = create_proxy(settings, engine, self._client)
        self._status.reset_prefix_cache = self._proxy.reset_prefix_cache
        self._status.abort_answers = self._state.answers.abort
        self._status.kv_paths = self._proxy.paths.report
        self._proxy.paths.on_change = self._status.notify
        # A router goes on elsewhere with answers that are aborted.
        self._lifetime = NodeLifetime(
            engine,
            self._status,
            self._state.open,
            self._proxy.abort_all,
            settings.drain_timeout_s,
            self._note_status,
        )
        self._metrics = create_metrics(engine, self._proxy, tracer)
        self._metrics.registry.register(CredentialsCollector(credentials))
        callers = CallerCheck(read_api_keys(settings), credentials)
        self._checker = GrammarChecker(engine.config.model)
        self._images = create_image_reader(settings, engine.config)
        app = create_node_app(
            settings,
            engine,
            text,
            self._proxy,
            self._metrics,
            self._state,
            callers,
            self._checker,
            self._images,
        )
        self._tls = credentials.server_tls("http", demands_certificate=not callers.has_keys)
        self._http = _create_http_server(settings, app, self._tls, callers)

    async def run(self, stop: StopSignal) -> int:
        """Serves until asked to stop, or to become another node, or until the engine dies; returns
        the exit code."""
        serve_answers(self._engine, self._status, self._proxy, self._ports.grpc)
        await self._ports.grpc.start(self._status)
        if self._ports.probes is not None:
            self._ports.probes.start(self._status, self._metrics.registry)
        serving = asyncio.create_task(self._http.serve(sockets=[self._ports.http]))
        watching = start_lasting(self._watch(), "the watch over the decode node")
        try:
            self._emit_ready()
            with self._metrics.lateness.watch():
                return await self._lifetime.run(stop)
        finally:
            self._http.should_exit = True
            watching.cancel()
            await asyncio.gather(serving, watching, return_exceptions=True)

    async def close(self) -> None:
        await self._ports.close()
        await asyncio.to_thread(self._checker.close)
        await asyncio.to_thread(self._images.close)
        await self._client.close()

    async def _watch(self) -> None:
        """Keeps health and load reports up to date."""
        while True:
            self._note_status()
            self._status.work.num_queued = self._proxy.num_queued
            if not self._state.unhealthy and not self._status.is_silent:
                await self._state.heartbeats.beat()
            await self._status.wait_change(_WATCH_S)

    def _note_status(self) -> None:
        self._state.draining = self._status.work.draining
        self._state.unhealthy = self._status.fault()

    def _emit_ready(self) -> None:
        address = join_address(*self._ports.http.getsockname()[:2])
        facts: dict[str, object] = {"role": "decode", "address": address}
        facts["url"] = f"{'https' if self._tls else 'http'}://{address}"
        facts["grpc_address"] = join_address(self._settings.host, self._ports.grpc.port)
        if self._ports.probes is not None:
            facts["metrics_port"] = self._ports.probes.port
        emit_ready(self._engine, self._settings.drain_timeout_s, **facts)


def _create_http_server(
    settings: DecodeNodeSettings, app: ASGIApp, tls: ServerTls | None, callers: CallerCheck
) -> HttpServer:
    return HttpServer(
        TlsConfig(
            app,
            tls,
            handshake_timeout_s=settings.header_timeout_s,
            http=guarded_protocol(settings.connection_limits(), callers, settings.http_front()),
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
            ws="none",
            proxy_headers=False,
        )
    )


@dataclass(frozen=True, slots=True)
class NodePorts:
    """The ports that a node listens on. Call `take` before anything that needs time."""

    http: socket.socket
    grpc: NodeGrpcServer
    probes: ProbeServer | None

    @classmethod
    def take(cls, settings: DecodeNodeSettings, credentials: Credentials) -> NodePorts:
        """Takes the ports. Raises `PortInUse`, `PlaintextRefused`."""
        host = settings.host
        credentials.check_listen(host)
        return cls(
            listen(host, settings.port, settings.send_timeout_s),
            NodeGrpcServer(host, settings.grpc_port, credentials, _callers(settings)),
            None if settings.metrics_port is None else ProbeServer(host, settings.metrics_port),
        )

    def begin(self, progress: StartProgress) -> None:
        """Answers probes while the node starts."""
        if self.probes is not None:
            self.probes.begin(progress)

    async def close(self) -> None:
        """Idempotent."""
        await self.grpc.stop()
        if self.probes is not None:
            await self.probes.stop()


def _callers(settings: DecodeNodeSettings) -> Mapping[str, Collection[Role]]:
    return PREFIX_CALLERS if settings.shares_prefixes else {}


async def serve(settings: DecodeNodeSettings) -> int:
    """Runs the node and returns its exit code. Raises `CheckpointError`, `TokenizerError`,
    `EngineDeadError`, `PortInUse`, `SecurityError`, `SettingsError`, `TracingError`."""
    check_files(settings)
    stop, progress = StopSignal(), StartProgress()
    credentials = Credentials(settings.security_config())
    ports = NodePorts.take(settings, credentials)
    ports.begin(progress)
    try:
        config = await asyncio.to_thread(settings.to_engine_config, "kv_consumer")
        tracer = Tracer.open(settings, "tandem-decode", config.engine_id)
        text = await asyncio.to_thread(ServedText.read, settings, config.model)
        config = only_kept_answers(config, text.tokenizer, text.parsers)
        engine = await start_engine(config, text.tokenizer, stop, progress)
        if engine is None:
            return 0
        node = DecodeNode(settings, engine, text, ports, credentials, tracer)
        try:
            return await node.run(stop)
        finally:
            await node.close()
            await engine.shutdown()
            await asyncio.to_thread(tracer.close)
    finally:
        await ports.close()


def create_prefill_client(
    settings: DecodeNodeSettings, engine: AsyncLLM, credentials: Credentials
) -> PrefillClient:
    us = engine.ready.peer
    assert us is not None, "a decode node's engine takes KV"
    return PrefillClient(
        us, engine.config.model.vocab_size, settings.handshake_timeout_s, credentials
    )


def create_credits(config: EngineConfig, num_blocks: int) -> KVCredits:
    """Returns the credits of an engine with a pool of this many blocks, or one in each of its
    data-parallel groups."""
    groups = config.kv_layout.groups
    num_seqs, num_groups = config.scheduler.max_num_seqs, config.parallel.data_parallel_size
    if besides := blocks_besides(groups, config.decode_query_len):
        # Blocks of the pool itself: in each, as many tokens as all groups together have there.
        span = max(1, int(1 / blocks_a_token(groups)))
        return KVCredits(num_blocks, span, num_seqs, besides, num_groups)
    # Credits count tokens in blocks of that size, whatever groups of layers take of the pool.
    block_size = config.cache.block_size
    num_blocks = tokens_that_fit(groups, num_blocks) // block_size
    return KVCredits(num_blocks, block_size, num_seqs, num_groups=num_groups)


def create_prefix_index(config: EngineConfig, credits: KVCredits) -> CachedPrefixes:
    """Returns what remembers prompts that need not be computed here. That is none where windows
    roll: those of a prompt that was pulled are of its end alone, so all of it would be computed."""
    groups, is_on = config.kv_layout.groups, config.cache.enable_prefix_caching
    num_groups = config.parallel.data_parallel_size
    if is_on and any(group.is_state for group in groups) and not windows_roll(groups):
        num_kept = credits.num_blocks // credits.num_states
        drafts = config.decode_query_len > 1
        return CachedStates(num_kept, state_stride(groups), num_groups, drafts=drafts)
    block_size = config.cache.block_size
    num_blocks = credits.num_blocks * credits.block_size // block_size
    is_of_use = is_on and credits.num_states == 0
    return CachedPrefixes(num_blocks if is_of_use else 0, block_size, num_groups)


def create_proxy(
    settings: DecodeNodeSettings, engine: AsyncLLM, client: PrefillClient
) -> DisaggProxy:
    config = engine.config
    credits = create_credits(config, engine.ready.num_blocks)
    return DisaggProxy(
        engine,
        client,
        credits,
        layout=config.kv_layout,
        prefix_index=create_prefix_index(config, credits),
        limits=RemotePrefillLimits(
            max_attempts=settings.max_prefill_attempts,
            first_token_s=settings.first_token_timeout_s,
            kv_s=settings.kv_timeout_s,
            lost_call_s=settings.kv_stall_timeout_s + _STALL_MARGIN_S,
        ),
        default_prefill_nodes=prefill_nodes(settings.prefill),
        local_prefill_threshold=settings.local_prefill_threshold,
        max_waiting_requests=settings.max_waiting_requests,
    )


def create_metrics(engine: AsyncLLM, proxy: DisaggProxy, tracer: Tracer) -> DecodeMetrics:
    metrics = DecodeMetrics(engine.config, tracer)
    metrics.registry.register(TracerCollector(tracer))
    metrics.registry.register(EngineCollector(engine))
    metrics.watch_proxy(proxy)
    return metrics


def create_node_app(
    settings: DecodeNodeSettings,
    engine: AsyncLLM,
    text: ServedText,
    proxy: DisaggProxy,
    metrics: DecodeMetrics,
    state: ApiState,
    callers: CallerCheck,
    checker: GrammarChecker,
    images: ImageReader,
) -> ASGIApp:
    adapters = engine.adapters.known
    served = create_served_model(settings, engine.config.model, adapters, text, images)
    tokenizer, parsers = text.tokenizer, text.parsers
    metrics.registry.register(GrammarCollector(checker))
    grammars = AnswerGrammars(
        served.config, tokenizer.added_token_ids, parsers.reasoning_format, checker
    )
    liveness = Liveness(
        heartbeats=state.heartbeats,
        send_timeout_s=settings.send_timeout_s,
        keepalive_s=settings.sse_keepalive_s,
    )
    serving = OpenAIServing(
        RequestReader(served, grammars, forces_usage=settings.enable_force_include_usage),
        ChoicePreparer(engine.config, cuts_answers=not settings.strict_max_tokens),
        Responder(proxy, state.answers, metrics, liveness),
    )
    ignored = IgnoredFields(metrics.fields_ignored, refuses=settings.strict_fields)
    cards = ModelCards(served, settings.model, chat_format(parsers, tokenizer))
    api = Api(
        settings,
        cards,
        serving,
        metrics,
        state,
        ignored,
        TokenizerServing(served),
        proxy.reset_prefix_cache,
        engine.profiles,
        engine.adapters,
    )
    return create_app(api, callers, lambda: proxy.open.count)


def check_files(settings: DecodeNodeSettings) -> None:
    """Raises `SettingsError` when a file that clients' requests need cannot be used: before any
    weights are read, which takes minutes."""
    read_api_keys(settings)
    with_template(Tokenizer.stand_in(1), settings.chat_template)


def read_api_keys(settings: DecodeNodeSettings) -> CallerKeys:
    """Returns the keys of clients. Raises `SettingsError` when the key file cannot be read: no node
    starts open by accident."""
    keys = settings.api_keys.get_secret_value().split(",")
    file = settings.api_key_file
    try:
        keys += [] if file is None else file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-key-file {file} cannot be read: {error}") from None
    return CallerKeys(key.strip() for key in keys)
