"""Tests what a node tells of its last steps, and of what held it up, over HTTP."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec
from prometheus_client import CollectorRegistry

from engine.frontend.step_history import HistoryReport, StepHistory
from engine.node.http_server import ProbeServer
from engine.node.status import NodeStatus
from host.pause_log import PauseKind
from tandem_pb import node_pb2
from tests.engine.frontend.test_node_status import StillEngine


async def test_steps_and_pauses_of_core_and_server_are_told() -> None:
    history = StepHistory("test")
    engine = StillEngine(history=history)
    probes = ProbeServer("127.0.0.1", 0)
    status = NodeStatus(engine, node_pb2.NODE_ROLE_DECODE, stuck_after_s=5.0)
    probes.start(status, CollectorRegistry())
    url = f"http://127.0.0.1:{probes.port}/steps"
    try:
        async with httpx.AsyncClient() as client:
            assert (await client.get(url, params={"since": "soon"})).status_code == 400
            began = await report(client, url)
            assert (began.steps, began.pauses) == ([], [])
            now = began.now
            history.steps.issued(7, now, 3, 4, 0, 1)
            history.steps.retired(7, now + 0.01)
            history.steps.worked(7, 1.5)
            history.core_pauses.add(PauseKind.TURN, now + 0.02, 0.004)
            told = await report_with_a_late_loop(client, url, now)
            assert told.steps == [(7, now, now + 0.01, 1.5, 3, 4, 0, 1)]
            [turn] = [pause for pause in told.pauses if pause.process == "engine core"]
            assert (turn.kind, turn.ended_at, turn.seconds) == ("turn", now + 0.02, 0.004)
            assert (await report(client, url, since=now + 1000)).steps == []
    finally:
        await probes.stop()
        history.close()


async def report(client: httpx.AsyncClient, url: str, since: float = 0.0) -> HistoryReport:
    answer = await client.get(url, params={"since": since})
    assert answer.status_code == 200
    return msgspec.json.decode(answer.content, type=HistoryReport)


async def report_with_a_late_loop(
    client: httpx.AsyncClient, url: str, since: float
) -> HistoryReport:
    """Holds the event loop up until that is told."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30):
        while True:
            loop.call_soon(time.sleep, 0.03)
            told = await report(client, url, since)
            if any(pause.kind == "event_loop" for pause in told.pauses):
                return told
