"""Both kinds of node as real processes with the demo checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.http import headers as names
from tandem_pb import prefill_pb2, prefill_pb2_grpc
from tests.decode_node.http_node import chunks_of, sse_events
from tests.decode_node.node_processes import TIMEOUT_S, NodeProcess, node_process

pytestmark = pytest.mark.e2e

PROMPT = "Ada the clockmaker walked to the library with the blue key and the lamp. "
HERE = {"x-prefiller-host-port": ","}


def body(i: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT * (1 + i % 3),
        "max_tokens": 24,
        "temperature": 0.8 * (i % 2),
        "seed": i,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


async def tokens(client: httpx.AsyncClient, i: int, **headers: str) -> tuple[list[int], dict]:
    headers = {"x-tandem-timeline": "1", **headers}
    response = await client.post("/v1/completions", json=body(i), headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["timeline"]


async def until_idle(client: httpx.AsyncClient) -> None:
    """Waits until all blocks and rows are back."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            lines = (await client.get("/metrics")).text.splitlines()
            values = {
                line.partition("{")[0]: float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith("tandem_") and "_bucket" not in line
            }
            if (
                values["tandem_kv_blocks_free"] == values["tandem_kv_blocks_total"] == 256
                and values["tandem_rows_free"] == 16
                and values["tandem_open_requests"] == 0
                and values["tandem_delayed_frees"] == 0
            ):
                return
            await asyncio.sleep(0.05)


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest())).status


async def test_prefill_and_decode_together_then_alone(demo_checkpoint: Path) -> None:
    """Equal to one node; a killed prefill node changes nothing; draining finishes what is open."""
    async with node_process("prefill_node", demo_checkpoint, "--metrics-port", "0") as prefill:
        await prefill.wait_ready()
        args = ("--prefill", prefill.ready["address"])
        async with node_process("decode_node", demo_checkpoint, *args) as decode:
            await decode.wait_ready()
            assert await health(prefill.ready["address"]) == health_pb2.HealthCheckResponse.SERVING
            url = decode.ready["url"]
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
                await compare_remote_with_local(client)
                await hear_lies(client)
                await drain_prefill(prefill, client)
                await drain_decode(decode, client)
        port = prefill.ready["metrics_port"]
        assert port > 0


async def compare_remote_with_local(client: httpx.AsyncClient) -> None:
    numbers = range(8)
    local = await asyncio.gather(*(tokens(client, i, **HERE) for i in numbers))
    remote = await asyncio.gather(*(tokens(client, i) for i in numbers))
    assert [found for found, _ in remote] == [found for found, _ in local]
    assert {timeline["path"] for _, timeline in local} == {"local"}
    assert {timeline["path"] for _, timeline in remote} == {"remote"}
    assert all(timeline["kv_bytes"] > 0 for _, timeline in remote)
    await until_idle(client)


class Liar(prefill_pb2_grpc.PrefillServicer):
    """Fits every decode node, and gives it this first token."""

    def __init__(self, token_id: int, num_ranks: int) -> None:
        self._token_id = token_id
        self._num_ranks = num_ranks

    async def Handshake(self, request: prefill_pb2.HandshakeRequest, context: Any) -> Any:
        del request.decode.ranks[:]
        for _ in range(self._num_ranks):
            request.decode.ranks.add(addresses=["127.0.0.1:1"])
        return prefill_pb2.HandshakeReply(prefill=request.decode)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> Any:
        yield prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token_id=self._token_id))


async def hear_lies(client: httpx.AsyncClient) -> None:
    """They cost a prompt on the decode node, and nothing else."""
    expected, _ = await tokens(client, 1, **HERE)
    for token_id, num_ranks in ((2**32 - 1, 1), (100_000, 1), (5, 0), (5, 9)):
        server = grpc.aio.server()
        liar = Liar(token_id, num_ranks)
        prefill_pb2_grpc.add_PrefillServicer_to_server(liar, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        found, timeline = await tokens(client, 1, **{"x-prefiller-host-port": f"127.0.0.1:{port}"})
        assert (found, timeline["path"]) == (expected, "local")
        await server.stop(0)
    await until_idle(client)


async def drain_prefill(prefill: NodeProcess, client: httpx.AsyncClient) -> None:
    """New prompts are computed on the decode node from then on."""
    running = [asyncio.create_task(tokens(client, i)) for i in range(4)]
    prefill.send(signal.SIGTERM)
    for task in running:
        await task
    assert await prefill.exit_code() == 0, "".join(prefill.log)
    expected, _ = await tokens(client, 1, **HERE)
    found, timeline = await tokens(client, 1)
    assert (found, timeline["path"]) == (expected, "local")


async def drain_decode(decode: NodeProcess, client: httpx.AsyncClient) -> None:
    long = body(3, max_tokens=400, stream=True)
    async with client.stream("POST", "/v1/completions", json=long) as response:
        lines = response.aiter_text()
        text = await anext(lines)
        decode.send(signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT_S):
            while (await client.get("/ready")).status_code != 503:
                await asyncio.sleep(0.01)
        refused = await client.post("/v1/completions", json=body(1))
        assert refused.status_code == 503 and "retry-after" in refused.headers
        async for more in lines:
            text += more
    chunks = chunks_of(text)
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 400
    assert await decode.exit_code() == 0, "".join(decode.log)


async def test_a_node_that_stops_waits_for_a_request_that_it_still_reads(
    demo_checkpoint: Path,
) -> None:
    """It has taken the request by its head; the prompt is not known when the node begins to
    drain."""
    content = json.dumps(body(3, stream=True)).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: node\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    async with node_process("decode_node", demo_checkpoint) as node, asyncio.timeout(TIMEOUT_S):
        await node.wait_ready()
        host, port = node.ready["address"].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        node.send(signal.SIGTERM)
        assert "1 requests are open" in await node.wait_log("draining:")
        writer.write(content)
        answer = await reader.read()
        writer.close()
        assert b" 200 " in answer.splitlines()[0] and b"data: [DONE]" in answer
        assert await node.exit_code() == 0, "".join(node.log)


async def test_a_killed_worker_ends_answers_with_an_error_and_the_node(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    """The report of it is named in the log and has nothing of what was asked, by whom."""
    secret = "Zanzibar"
    args = ("--crash-report-dir", str(tmp_path), "--api-keys", f"key-{secret}")
    async with node_process("decode_node", demo_checkpoint, *args) as node:
        await node.wait_ready()
        (worker,) = node.descendants("engine.executor.worker_proc")
        who = {
            "authorization": f"Bearer key-{secret}",
            "x-request-id": f"request-{secret}",
            names.SESSION: f"session-{secret}",
        }
        url = node.ready["url"]
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=who) as client:
            prompt = f"{PROMPT} {secret} {secret}"
            asked = await client.post("/tokenize", json={"prompt": prompt})
            long = body(3, max_tokens=1500, stream=True, prompt=prompt, user=f"user-{secret}")
            async with client.stream("POST", "/v1/completions", json=long) as response:
                lines = response.aiter_text()
                text = await anext(lines)
                os.kill(worker, signal.SIGKILL)
                async for more in lines:
                    text += more
        *_, last = sse_events(text)
        message = json.loads(last)["error"]["message"]
        assert "SIGKILL" in message and str(tmp_path) not in message
        assert await node.exit_code() == 1
        (report,) = tmp_path.iterdir()
        assert any("died" in line and str(report) in line for line in node.log)
    told = report.read_text(encoding="utf-8")
    assert json.loads(told)["engine"]["requests"]
    assert secret.lower() not in told.lower()
    tokens = asked.json()["tokens"]
    assert str(tokens)[1:-1].replace(" ", "") not in "".join(told.split())


async def test_a_node_can_be_stopped_while_it_loads(demo_checkpoint: Path) -> None:
    """A node may be ready before a late process of ours stops it: then another one is stopped."""
    for _ in range(5):
        async with node_process("prefill_node", demo_checkpoint) as node:
            await node.wait_event("progress")
            await node.freeze()
            if node.is_ready:
                continue
            node.send(signal.SIGTERM)
            node.send(signal.SIGCONT)
            assert await node.exit_code() == 0, "".join(node.log)
            assert not node.is_ready
            return
    pytest.fail("every node was ready before it could be stopped")


@pytest.mark.parametrize("module", ["prefill_node", "decode_node"])
async def test_a_wrong_folder_is_named(module: str, tmp_path: Path) -> None:
    async with node_process(module, tmp_path) as node:
        assert await node.exit_code() == 1
        assert str(tmp_path) in "".join(node.log)
        assert "Traceback" not in "".join(node.log)


@pytest.mark.parametrize("module", ["prefill_node", "decode_node"])
async def test_a_port_in_use_is_named(module: str, demo_checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with node_process(module, demo_checkpoint, "--port", port) as node:
            assert await node.exit_code() == 1
            log = "".join(node.log)
            assert port in log and "choose another port" in log and "Traceback" not in log
