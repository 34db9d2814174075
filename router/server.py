"""The router as a process: listens, says so, and ends without breaking an answer.

1. listening   the socket is bound, watches have begun; one JSON line on standard output
2. draining    SIGTERM or SIGINT: `/ready` says no, and for `drain_delay_s` requests are still
               taken, so that load balancers have time to notice
3. closing     no new connections; open answers may take `drain_timeout_s` to end
4. ended       exit code 0. A second signal cuts the open answers short.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from types import FrameType

import uvicorn

from router.app import OuterWorld, Services, create_app
from router.config import RouterSettings

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
"""Longer than HTTP clients keep idle connections (5 to 15 s): if we closed first, a request that
was just being sent would be lost with the connection."""


class RouterServer(uvicorn.Server):
    def __init__(
        self, settings: RouterSettings, listener: socket.socket, world: OuterWorld | None = None
    ) -> None:
        app = create_app(settings, world)
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=4096,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
            )
        )
        self.services: Services = app.state.services
        self._drain_delay_s = settings.drain_delay_s
        self._listener = listener
        self._closing: asyncio.TimerHandle | None = None

    async def run_until_drained(self) -> None:
        await self.serve(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        ready = {"event": "ready", "role": "router", "host": host, "port": port}
        print(json.dumps(ready), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by Python in between two steps of the event loop."""
        if self.services.draining:
            self.force_exit = self.should_exit = True
            return
        self.services.draining = True
        logger.info("draining: closing in %g s", self._drain_delay_s)
        loop = asyncio.get_event_loop()
        loop.call_soon_threadsafe(loop.call_later, self._drain_delay_s, self._close)

    def _close(self) -> None:
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Raises `OSError` when the address cannot be had.

    The protocol is named because asyncio turns off Nagle's delay only for sockets that say TCP.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
