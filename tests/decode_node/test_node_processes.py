"""Both kinds of node as real processes with the demo checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.local_cluster.cluster import free_ports
from edge.http import headers as names
from tandem_pb import kv_transfer_pb2, prefill_pb2, prefill_pb2_grpc
from tests.decode_node.hostile_decode_node import HostileDecodeNode
from tests.decode_node.hostile_prefix_holder import LIES, HostilePrefixHolder
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


async def tokens(
    client: httpx.AsyncClient, i: int, more: dict[str, Any] | None = None, **headers: str
) -> tuple[list[int], dict]:
    headers = {"x-tandem-timeline": "1", **headers}
    content = body(i, **(more or {}))
    response = await client.post("/v1/completions", json=content, headers=headers)
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
                values["tandem_kv_blocks_free"] == values["tandem_kv_blocks"] == 256
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
    flags = (
        "--metrics-port",
        "0",
        "--kv-share-prefixes",
        "always",
        "--kv-lease-s",
        "3",
        "--kv-stall-timeout-s",
        "1",
    )
    async with node_process("prefill_node", demo_checkpoint, *flags) as prefill:
        await prefill.wait_ready()
        args = ("--prefill", prefill.ready["address"])
        async with node_process("decode_node", demo_checkpoint, *args) as decode:
            await decode.wait_ready()
            assert await health(prefill.ready["address"]) == health_pb2.HealthCheckResponse.SERVING
            url = decode.ready["url"]
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
                await compare_remote_with_local(client)
                us = await hear_lies(client)
                await suffer_a_hostile_decode_node(prefill, us, client)
                await pull_from_a_hostile_peer(prefill, client)
                await follow_a_hostile_router(decode, client)
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
        self.decode = kv_transfer_pb2.KVPeer()
        """Holds what the last decode node said of itself."""

    async def Handshake(self, request: prefill_pb2.HandshakeRequest, context: Any) -> Any:
        self.decode.CopyFrom(request.decode)
        del request.decode.ranks[:]
        for _ in range(self._num_ranks):
            request.decode.ranks.add(addresses=["127.0.0.1:1"])
        return prefill_pb2.HandshakeReply(prefill=request.decode)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> Any:
        yield prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token_id=self._token_id))


async def hear_lies(client: httpx.AsyncClient) -> kv_transfer_pb2.KVPeer:
    """They cost a prompt on the decode node, and nothing else. Returns what it says of itself."""
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
    return liar.decode


async def suffer_a_hostile_decode_node(
    prefill: NodeProcess, us: kv_transfer_pb2.KVPeer, client: httpx.AsyncClient
) -> None:
    """Each lie is refused, what it holds keeps nobody from anything, and nothing is left of it."""
    expected, _ = await tokens(client, 1, **HERE)
    async with HostileDecodeNode.join(prefill.ready["address"], us) as liar:
        assert await liar.tell_lies() == {}
        assert await tokens(client, 1) == (expected, ANY)
        assert await liar.hold_prefixes(200) == 256 // 8, "one block in eight is held for peers"
        await liar.hold_what_it_can()
        assert await tokens(client, 1) == (expected, ANY)
    await until_nothing_is_held(prefill)
    await until_idle(client)


async def pull_from_a_hostile_peer(prefill: NodeProcess, client: httpx.AsyncClient) -> None:
    """Whatever a peer says that it holds, the prompt is computed without."""
    for number, (lie, answer) in enumerate(LIES):
        async with HostilePrefixHolder.listen(lie, answer) as liar:
            fresh = {
                "prompt": f"Key {number} of the clockmaker opens no lock of the library. " * 12
            }
            expected, _ = await tokens(client, 1, fresh, **HERE)
            holder = {"x-tandem-prefix-holder": f"decode/{liar.address}"}
            assert (await tokens(client, 1, fresh, **holder))[0] == expected, number
            assert liar.num_answered == 1, number
    await until_nothing_is_held(prefill)
    await until_idle(client)


async def until_nothing_is_held(prefill: NodeProcess) -> None:
    url = f"http://127.0.0.1:{prefill.ready['metrics_port']}/metrics"
    async with httpx.AsyncClient() as client, asyncio.timeout(TIMEOUT_S):
        while (held := _held(await client.get(url))) != {}:
            await asyncio.sleep(0.05)
    assert held == {}


def _held(answer: httpx.Response) -> dict[str, float]:
    """Returns what a prefill node has not got back."""
    rest = {
        "tandem_kv_blocks_free": 256.0,
        "tandem_rows_free": 16.0,
        "tandem_delayed_frees": 0.0,
        "tandem_open_prefills": 0.0,
        "tandem_kv_transfer_live_transfers": 0.0,
        "tandem_kv_transfer_staged_bytes": 0.0,
        "tandem_kv_transfer_leases": 0.0,
        "tandem_kv_transfer_open_pulls": 0.0,
    }
    lines = [line.rpartition(" ") for line in answer.text.splitlines()]
    found = {name.partition("{")[0]: float(value) for name, _, value in lines if "#" not in name}
    return {name: found[name] for name, value in rest.items() if found[name] != value}


LYING_HEADERS = {
    "nodes that are nobody": {
        "x-prefiller-host-port": ",".join(f"127.0.0.1:{port}" for port in range(1, 99))
    },
    "no node": {"x-prefiller-host-port": "unix:/etc/passwd"},
    "a holder that is nobody": {"x-tandem-prefix-holder": "prefill/127.0.0.1:1"},
    "an adapter that is not here": {"x-tandem-adapter": "f" * 64},
    "an enormous salt": {"x-tandem-cache-salt": "s" * 12_000},
    "an enormous prefix": {"x-tandem-prefix": "9" * 40},
    "another model": {"x-tandem-model": "%1b%5b"},
}
START = ["start", 1763700000, [1]]
LYING_JOURNALS: dict[str, list[Any]] = {
    "tokens of no vocabulary": [START, ["tokens", 0, [100_000]]],
    "tokens below nothing": [START, ["tokens", 0, [-5]]],
    "tokens without end": [START, ["tokens", 0, [5] * 300_000]],
    "a choice before the first": [START, ["tokens", -1, [5]]],
    "a choice that is not there": [START, ["tokens", 9, [5]]],
    "choices without end": [["start", 1763700000, [1] * 100_000]],
    "a seed that is none": [["start", 1763700000, [1 << 64]]],
    "a time that is none": [["start", 10**30, [1]]],
    "cached tokens below nothing": [START, ["cached", 0, -5]],
    "an end that is none": [START, ["end", 0, "x" * 10_000, None]],
    "events without end": [START, ["numbered", 0, [5], -1]],
}


async def follow_a_hostile_router(decode: NodeProcess, client: httpx.AsyncClient) -> None:
    """Headers and journals that make no sense are refused, or cost their own request a detour."""
    expected, _ = await tokens(client, 1, **HERE)
    for name, headers in LYING_HEADERS.items():
        answer = await client.post("/v1/completions", json=body(1), headers=headers)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["token_ids"] == expected, name
        else:
            assert answer.status_code in (400, 404, 503) and "error" in answer.json(), name
    content = json.dumps(body(1, stream=True)).encode()
    asked = {
        "content-type": "application/json",
        "x-tandem-journal": "1",
        "x-tandem-resume": str(len(content)),
    }
    for name, entries in LYING_JOURNALS.items():
        data = content + json.dumps(entries).encode()
        answer = await client.post("/v1/completions", content=data, headers=asked)
        assert answer.status_code == 400 and answer.json()["error"]["message"], name
    assert (await tokens(client, 1))[0] == expected
    assert decode.process.returncode is None
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


async def test_a_node_answers_and_can_be_stopped_while_it_loads(demo_checkpoint: Path) -> None:
    """A node may be ready before a late process of ours stops it: then another one is stopped."""
    for _ in range(5):
        (port,) = free_ports(1)
        probes = f"http://127.0.0.1:{port}"
        async with (
            node_process("prefill_node", demo_checkpoint, "--metrics-port", str(port)) as node,
            httpx.AsyncClient() as client,
        ):
            await node.wait_event("progress")
            paths = "/health/live", "/ready", "/health", "/metrics"
            answers = [await client.get(probes + path) for path in paths]
            await node.freeze()
            if node.is_ready:
                continue
            assert [answer.status_code for answer in answers] == [200, 503, 503, 503]
            stage = node.events[0]["stage"].replace("_", " ")
            assert answers[0].text.startswith(f"starting: {stage}, "), answers[0].text
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
