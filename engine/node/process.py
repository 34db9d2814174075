"""Does what node processes of all roles do alike: say how far they are, log, stop on SIGTERM.

Standard output has one JSON object a line, for the parent process; people read the log
on standard error. Exit codes: 0 stopped as asked, 1 could not start or the engine died.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine

import uvloop

from edge.http.event_loop.long_work import take_short_turns
from edge.logs.setup import tell_failure
from edge.program import settle
from edge.security.config import SecurityError
from edge.supervisor import tell_supervisor
from edge.tracing.errors import TracingError
from engine.config import EngineConfig
from engine.contracts.errors import CannotStartError, EngineDeadError
from engine.contracts.messages import LoadProgress
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.tokenizer import Tokenizer
from engine.kv_cache.capacity import tokens_that_fit
from engine.node.grpc_server import PortInUse
from engine.node.settings.engine_settings import SettingsError
from engine.node.start_progress import StartProgress


def run_node(name: str, serve: Coroutine[None, None, int]) -> int:
    """Returns the exit code of `serve`, or 1 when the node could not start or its engine died.
    `name`: what the line that says so calls the node."""
    take_short_turns()
    try:
        return uvloop.run(serve)
    except (
        CannotStartError,
        EngineDeadError,
        PortInUse,
        SecurityError,
        SettingsError,
        TracingError,
        OSError,
    ) as error:
        tell_failure(name, error)
        return 1


def emit_ready(engine: AsyncLLM, drain_s: float, **facts: object) -> None:
    """Says that the node serves. `facts` tell where, and as what; `drain_s` how long it lets open
    answers end when it is stopped."""
    config = engine.config
    tell_supervisor(
        "ready",
        **facts,
        drain_s=drain_s,
        pid=os.getpid(),
        engine_id=config.engine_id,
        kv_cache_tokens=tokens_that_fit(
            config.kv_layout.groups,
            engine.ready.num_blocks,
            config.scheduler.max_num_batched_tokens,
        ),
    )


class StopSignal:
    """Turns SIGTERM or SIGINT into something to wait for. A second one is not special."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked.set)

    @property
    def is_set(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()


async def start_engine(
    config: EngineConfig, tokenizer: Tokenizer | None, stop: StopSignal, progress: StartProgress
) -> AsyncLLM | None:
    """Returns the engine when it is ready; None when we were asked to stop meanwhile. `progress`
    follows it. Raises EngineDeadError."""

    def report(made: LoadProgress) -> None:
        progress.note(made)
        _report(made)

    progress.stage = "engine"
    starting = asyncio.create_task(AsyncLLM.start(config, report, tokenizer))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    if starting.cancelled():
        return None
    engine = starting.result()
    settle()
    return engine


def _report(progress: LoadProgress) -> None:
    tell_supervisor(
        "progress",
        stage=progress.stage,
        fraction=round(progress.fraction, 4),
        **({"total_bytes": progress.total_bytes} if progress.total_bytes else {}),
    )
