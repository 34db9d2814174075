"""Asks a container how it is, as its probes say, and counts the answers.

    httpGet     status 200 to 399          grpc   the health service says SERVING
    tcpSocket   a connection opens         exec   exit code 0

A probe's verdict changes after `failureThreshold` failures or `successThreshold` successes in a
row. A kubelet asks once a period; here it is asked more often, so that tests need not wait for a
pod that is ready. Failures must last as long as so many periods, as there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.kubernetes_stand_in.resources import Object

_ASKS_A_PERIOD = 5

Exec = Callable[[list[str], float], Awaitable[int]]


class Prober:
    """Probes one container at one address. `run_command` runs a command inside the container."""

    def __init__(self, container: Object, address: str, run_command: Exec) -> None:
        self._container = container
        self._address = address
        self._exec = run_command

    async def watch(self, kind: str, on_verdict: Callable[[bool], None]) -> None:
        """Asks for ever; tells each verdict, the first and whenever it changes. Returns at once
        when the container has no probe of that kind."""
        probe = self._container.get(kind)
        if probe is None:
            return
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        period_s = probe.get("periodSeconds", 10)
        needed = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
        lasting_s = {True: 0, False: (needed[False] - 1) * period_s}
        verdict: bool | None = None
        last, count, since = False, 0, 0.0
        while True:
            answer, now = await self._ask(probe), time.monotonic()
            if answer != last or not count:
                last, count, since = answer, 0, now
            count += 1
            is_sure = count >= needed[answer] and now - since >= lasting_s[answer]
            if is_sure and answer != verdict:
                verdict = answer
                on_verdict(answer)
            await asyncio.sleep(period_s / _ASKS_A_PERIOD)

    async def wait_started(self) -> bool:
        """Returns whether the startup probe succeeded before it gave up."""
        if "startupProbe" not in self._container:
            return True
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def decide(verdict: bool) -> None:
            if not found.done():
                found.set_result(verdict)

        watching = asyncio.create_task(self.watch("startupProbe", decide))
        try:
            return await found
        finally:
            watching.cancel()

    async def _ask(self, probe: dict[str, Any]) -> bool:
        timeout_s = probe.get("timeoutSeconds", 1)
        try:
            async with asyncio.timeout(timeout_s):
                if "httpGet" in probe:
                    return await self._http(probe["httpGet"])
                if "grpc" in probe:
                    return await self._grpc(probe["grpc"])
                if "tcpSocket" in probe:
                    return await self._tcp(probe["tcpSocket"])
                return await self._exec(probe["exec"]["command"], timeout_s) == 0
        except (TimeoutError, OSError, aiohttp.ClientError, grpc.aio.AioRpcError):
            return False

    async def _http(self, action: dict[str, Any]) -> bool:
        scheme = action.get("scheme", "HTTP").lower()
        host = action.get("host", self._address)
        url = f"{scheme}://{host}:{self._port(action['port'])}{action.get('path', '/')}"
        headers = {h["name"]: h["value"] for h in action.get("httpHeaders", ())}
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers=headers, ssl=False, allow_redirects=False) as response,
        ):
            return 200 <= response.status < 400

    async def _grpc(self, action: dict[str, Any]) -> bool:
        target = f"{self._address}:{action['port']}"
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=action.get("service") or "")
            answer = await stub.Check(request)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _tcp(self, action: dict[str, Any]) -> bool:
        _, writer = await asyncio.open_connection(self._address, self._port(action["port"]))
        writer.close()
        return True

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        return next(
            int(p["containerPort"]) for p in self._container["ports"] if p.get("name") == port
        )
