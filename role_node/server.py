"""Runs a node that is a prefill or a decode node, and changes from one to the other when asked.

         ┌────────────────────── one engine, one set of workers ──────────────────────┐
    ports held (probes answer from here on), checkpoint read, engine started
         │
         ▼
    services of its role ── asked for the other: drained, like a node that stops ──▶ engine switches
         ▲                                                                                │
         └────────── services of the other role, a new epoch, ready again ◀───────────────┘

-  SIGTERM, at any moment: as on a node of one role; exit code 0
-  the engine dies, also while it switches: exit code 1. A supervisor that starts the node again
   gets it in the role that `--role` names
-  a switch that is refused changes nothing (`RoleSwitch`, `refuse_what_has_one_role`,
   `certificate_obstacle`)

While the engine switches, the services of the old role still say that the node drains.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from typing import Protocol

from decode_node.prefix_sharing import only_kept_answers
from decode_node.served_text import ServedText
from decode_node.server import DecodeNode, NodePorts, check_files
from edge.security.config import SecurityError
from edge.security.credentials import Credentials
from edge.tracing.tracer import Tracer
from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.text.detokenizer import TokenDecoder
from engine.frontend.tokenizer import Tokenizer
from engine.node.process import StopSignal, start_engine
from engine.node.services.role_switch import RoleSwitch
from engine.node.start_progress import StartProgress
from prefill_node.server import PrefillNode, PrefillPorts
from role_node.certificate import certificate_obstacle
from role_node.config import RoleNodeSettings
from role_node.ports import HeldPorts
from role_node.role_engines import KV_ROLES, RoleEngines, RoleName
from tandem_pb import node_pb2

logger = logging.getLogger(__name__)

_ROLES: dict[RoleName, node_pb2.NodeRole] = {
    "prefill": node_pb2.NODE_ROLE_PREFILL,
    "decode": node_pb2.NODE_ROLE_DECODE,
}


class OneLife(Protocol):
    """Is a node in one role."""

    async def run(self, stop: StopSignal) -> int: ...
    async def close(self) -> None: ...


class RoleNode:
    """Is one node after the other. `settings` name ports, none of them 0."""

    def __init__(
        self,
        settings: RoleNodeSettings,
        engines: RoleEngines,
        text: ServedText,
        credentials: Credentials,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._text = text
        self._credentials = credentials
        self._role: RoleName = settings.role

    async def run(
        self, ports: NodePorts | PrefillPorts, progress: StartProgress, stop: StopSignal
    ) -> int:
        """Serves until asked to stop, or until the engine dies; returns the exit code. `ports` are
        those of its first role, and the caller's to close. Raises `EngineDeadError`,
        `PortInUse`."""
        config = self._engines.of(self._role)
        engine = await start_engine(config, self._tokenizer(self._role), stop, progress)
        if engine is None:
            return 0
        try:
            while True:
                code, role = await self._live(engine, ports, stop)
                if role is None:
                    return code
                self._role = role
                ports = take_ports(self._settings, role, self._credentials)
        finally:
            await engine.shutdown()

    async def _live(
        self, engine: AsyncLLM, ports: NodePorts | PrefillPorts, stop: StopSignal
    ) -> tuple[int, RoleName | None]:
        """Is a node in one role until its end. Returns the exit code, and what it shall be next;
        None: nothing."""
        limit_s, http_port = self._settings.drain_timeout_s, self._settings.port
        switch = RoleSwitch(
            _ROLES[self._role],
            limit_s,
            http_port,
            obstacle=lambda: certificate_obstacle(self._credentials),
        )
        name = f"tandem-{self._role}"
        tracer = Tracer.open(self._settings, name, engine.config.engine_id)
        node = self._node(engine, ports, tracer, switch)
        try:
            code = await node.run(stop)
            if code or stop.is_set or switch.request is None:
                return code, None
            role: RoleName = "prefill" if self._role == "decode" else "decode"
            settings, tokenizer = self._settings, self._tokenizer(role)
            await switch_engine(engine, self._engines.of(role), tokenizer, settings)
            return 0, role
        finally:
            await node.close()
            await asyncio.to_thread(tracer.close)
            # What this life has left in cycles of references would wait for a full collection,
            # which is rare (`engine.node.process`); nothing is served now.
            del node, switch
            gc.collect()

    def _tokenizer(self, role: RoleName) -> Tokenizer | None:
        return self._text.tokenizer if role == "decode" else None

    def _node(
        self, engine: AsyncLLM, ports: NodePorts | PrefillPorts, tracer: Tracer, switch: RoleSwitch
    ) -> OneLife:
        credentials = self._credentials
        if isinstance(ports, PrefillPorts):
            settings = self._settings.for_prefill()
            return PrefillNode(settings, engine, ports, credentials, tracer, switch)
        return DecodeNode(self._settings, engine, self._text, ports, credentials, tracer, switch)


class SwitchedEngine(Protocol):
    """The part of `AsyncLLM` that changes its role."""

    async def switch_role(
        self, config: EngineConfig, tokenizer: TokenDecoder | None, empty_within_s: float
    ) -> None: ...


async def switch_engine(
    engine: SwitchedEngine,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    settings: RoleNodeSettings,
) -> None:
    """Makes the engine that of `config`. Raises `EngineDeadError`, also for one that hangs: no step
    is on its way then, by which anything would notice."""
    started_at = time.monotonic()
    limit_s = settings.switch_empty_s + settings.stuck_after_s
    try:
        async with asyncio.timeout(limit_s):
            await engine.switch_role(config, tokenizer, settings.switch_empty_s)
    except TimeoutError:
        raise EngineDeadError(
            f"the engine has not changed its role within {limit_s:g} s; the node must be started "
            "again"
        ) from None
    name = "prefill" if config.is_producer else "decode"
    taken_s = time.monotonic() - started_at
    logger.info("the engine is that of a %s node after %.2f s", name, taken_s)


def hold_ports(settings: RoleNodeSettings, held: HeldPorts) -> RoleNodeSettings:
    """Returns the settings with the ports that the node has in either role. Raises `PortInUse`."""
    names = ["port", "grpc_port", *(["metrics_port"] if settings.metrics_port is not None else [])]
    return settings.model_copy(update={name: held.hold(getattr(settings, name)) for name in names})


def take_ports(
    settings: RoleNodeSettings, role: RoleName, credentials: Credentials
) -> NodePorts | PrefillPorts:
    """Takes the ports of a role. Raises `PortInUse`."""
    if role == "decode":
        return NodePorts.take(settings, credentials)
    return PrefillPorts.take(settings.for_prefill(), credentials)


def read_model(
    settings: RoleNodeSettings, *, is_check: bool = False
) -> tuple[RoleEngines, ServedText]:
    """Reads what both roles need to know of the model. May load it from a hub. `is_check`: the node
    may run elsewhere."""
    prefill, decode = (
        settings.to_engine_config(role, is_check=is_check) for role in KV_ROLES.values()
    )
    text = ServedText.read(settings, decode.model)
    decode = only_kept_answers(decode, text.tokenizer, text.parsers)
    return RoleEngines(prefill, decode), text


async def serve(settings: RoleNodeSettings) -> int:
    """Runs the node and returns its exit code. Raises `CannotStartError`, `EngineDeadError`,
    `PortInUse`, `SecurityError`, `SettingsError`, `TokenizerError`, `TracingError`."""
    stop = StopSignal()
    settings.check_roles()
    check_files(settings)
    credentials = Credentials(settings.security_config())
    credentials.check_listen(settings.host)
    if obstacle := certificate_obstacle(credentials):
        raise SecurityError(obstacle)
    held, progress = HeldPorts(settings.host), StartProgress()
    try:
        settings = hold_ports(settings, held)
        ports = take_ports(settings, settings.role, credentials)
        try:
            ports.begin(progress)
            engines, text = await asyncio.to_thread(read_model, settings)
            node = RoleNode(settings, engines, text, credentials)
            return await node.run(ports, progress, stop)
        finally:
            await ports.close()
    finally:
        held.close()
