"""Everything wrong that a client or a stranger can send to a running cluster, on each of its ports.

Two streams of a well-behaved client run all the while; none of them may be hurt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest
import pytest_asyncio

from engine.contracts.model_identity import identified
from engine.contracts.request_spec import RequestSpec, encode_spec
from engine.contracts.sampling_params import SamplingParams
from engine.models.identity import model_hash_of
from engine.node.settings.engine_settings import EngineSettings
from kv_transfer.metadata import KVPeer
from kv_transfer.wire.handshake import peer_to_proto
from tandem_pb import kv_transfer_pb2 as pb
from tandem_pb import node_pb2, prefill_pb2

KEY, NODE_KEY = "client-key", "node-key"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TARGETS = ["router", "decode"]


class Bystander:
    """A client whose answers must go on being right, whatever others do."""

    def __init__(self, complete: Any, url: str) -> None:
        self._call = lambda: complete(
            url,
            headers={"authorization": f"Bearer {KEY}"},
            prompt=[(3 * i) % 400 + 10 for i in range(90)],
            max_tokens=40,
            temperature=0.9,
            seed=4,
            ignore_eos=True,
        )
        self.num_answers = 0
        self.expected = ""
        self.hurt: list[str] = []

    async def run(self) -> None:
        while True:
            result = await self._call()
            self.num_answers += 1
            self.expected = self.expected or result.text
            if result.error or result.text != self.expected or result.status != 200:
                self.hurt.append(f"{result.status} {result.error} {result.text!r}")

    async def check(self) -> None:
        """Checks that an answer that was begun after now is right, and so were all before."""
        async with asyncio.timeout(60):
            goal = self.num_answers + 2
            while self.num_answers < goal:
                await asyncio.sleep(0.02)
        assert not self.hurt


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def cluster(share_cluster: Any) -> AsyncIterator[Any]:
    running = await share_cluster(
        decode_args=["--api-keys", NODE_KEY, "--local-prefill-threshold", "0"],
        router_args=["--api-keys", KEY, "--node-api-key", NODE_KEY],
    )
    yield running
    await running.wait_empty()


@pytest_asyncio.fixture(loop_scope="session", scope="module", autouse=True)
async def bystander(cluster: Any, complete: Any) -> AsyncIterator[Bystander]:
    client = Bystander(complete, cluster.url)
    tasks = [asyncio.create_task(client.run()) for _ in range(2)]
    yield client
    await client.check()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, cluster: Any) -> tuple[str, dict[str, str]]:
    """Base URL, and the headers that it asks for."""
    at_router = request.param == "router"
    url = cluster.url if at_router else cluster.decodes[0].url
    key = KEY if at_router else NODE_KEY
    return url, {"authorization": f"Bearer {key}", "content-type": "application/json"}


# Bodies ----------------------------------------------------------------------------------------

BAD_BODIES: dict[str, tuple[str, dict[str, Any], int, list[str]]] = {
    "unknown model": (COMPLETIONS, {"model": "gpt-7", "prompt": "x"}, 404, ["gpt-7", "demo"]),
    "model of a wrong type": (COMPLETIONS, {"model": ["demo"], "prompt": "x"}, 400, ["model"]),
    "no prompt": (COMPLETIONS, {}, 400, ["prompt"]),
    "empty text": (COMPLETIONS, {"prompt": ""}, 400, ["empty"]),
    "empty list": (COMPLETIONS, {"prompt": []}, 400, ["empty"]),
    "mixed prompt": (COMPLETIONS, {"prompt": [1, "a"]}, 400, ["prompt"]),
    "token id too high": (COMPLETIONS, {"prompt": [100_000]}, 400, ["100000", "0 to"]),
    "token id below zero": (COMPLETIONS, {"prompt": [-1]}, 400, ["-1", "0 to"]),
    "prompt beyond the context": (COMPLETIONS, {"prompt": [9] * 3000}, 400, ["2048", "3000"]),
    "no tokens wanted": (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, ["max_tokens"]),
    "a number as text": (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, 400, ["max_tokens"]),
    "cold": (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, 400, ["temperature", "-0.1"]),
    "top_p": (COMPLETIONS, {"prompt": "x", "top_p": -0.1}, 400, ["top_p"]),
    "min_p": (COMPLETIONS, {"prompt": "x", "min_p": 2}, 400, ["min_p"]),
    "top_k": (COMPLETIONS, {"prompt": "x", "top_k": -7}, 400, ["top_k"]),
    "penalty": (COMPLETIONS, {"prompt": "x", "presence_penalty": 9}, 400, ["presence_penalty"]),
    "many choices": (COMPLETIONS, {"prompt": "x", "n": 1000}, 400, ["1000"]),
    "bias of no token": (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, 400, ["logit_bias"]),
    "beam search": (
        COMPLETIONS,
        {"prompt": "x", "use_beam_search": True, "stream": True},
        400,
        ["beam search"],
    ),
    "adapter": (CHATS, {"messages": [USER], "lora_path": "x"}, 400, ["lora_path", "adapter"]),
    "half a surrogate": (COMPLETIONS, {"prompt": "a\ud800b"}, 400, []),
    "half a surrogate in a chat": (
        CHATS, {"messages": [{"role": "user", "content": "\udfff"}]}, 400, [],
    ),
    "no messages": (CHATS, {"messages": []}, 400, ["messages"]),
    "messages are text": (CHATS, {"messages": "hi"}, 400, ["messages"]),
    "unknown role": (CHATS, {"messages": [{"role": "cat", "content": "x"}]}, 400, ["role"]),
    "prompt in a chat": (CHATS, {"messages": [USER], "prompt": "x"}, 400, ["prompt"]),
    "tools": (CHATS, {"messages": [USER], "tools": [{}]}, 400, ["tools"]),
    "response format": (
        CHATS, {"messages": [USER], "response_format": {"type": "json_schema"}}, 400,
        ["response_format"],
    ),
}  # fmt: skip

RAW_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"prompt": "x"',
    "no object": b'["prompt"]',
    "not JSON": b"prompt=x",
    "not UTF-8": b'{"prompt": "\xff\xfe\xfa"}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": 1e999}',
    "minus infinity": b'{"prompt": "x", "top_p": -Infinity}',
    "a number of 5000 digits": b'{"prompt": "x", "seed": ' + b"7" * 5000 + b"}",
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep in an ignored field": b'{"prompt": "x", "user": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    "bytes": bytes(range(256)) * 40,
    "nulls": b"\0" * 5000,
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
}


async def check_error(response: aiohttp.ClientResponse, status: int) -> str:
    """Expects the API's error body and nothing else. Returns the message."""
    text = await response.text()
    assert response.status == status, text
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and error["code"]
    assert response.headers["x-request-id"]
    return str(error["message"])


@pytest.mark.e2e
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_bodies(http: Any, target: Any, name: str) -> None:
    url, headers = target
    path, body, status, words = BAD_BODIES[name]
    for stream in (False, True):
        raw = json.dumps({"stream": stream, **body}).encode()
        async with http.post(f"{url}{path}", data=raw, headers=headers) as response:
            message = await check_error(response, status)
        assert all(word in message for word in words), message


@pytest.mark.e2e
@pytest.mark.parametrize("name", RAW_BODIES)
async def test_bad_bytes(http: Any, target: Any, name: str) -> None:
    url, headers = target
    for path in (COMPLETIONS, CHATS):
        async with http.post(f"{url}{path}", data=RAW_BODIES[name], headers=headers) as response:
            await check_error(response, 400)


@pytest.mark.e2e
async def test_of_two_equal_keys_the_last_counts(http: Any, target: Any) -> None:
    """As in every JSON parser; both hops must agree about it."""
    url, headers = target
    raw = b'{"model": "no", "model": "demo", "prompt": "x", "max_tokens": 7, "max_tokens": 2}'
    async with http.post(f"{url}{COMPLETIONS}", data=raw, headers=headers) as response:
        assert response.status == 200
        assert (await response.json())["usage"]["completion_tokens"] <= 2


@pytest.mark.e2e
async def test_sizes_paths_methods_and_keys(http: Any, target: Any) -> None:
    url, headers = target
    post = f"{url}{COMPLETIONS}"
    big = json.dumps({"prompt": "x" * (10 << 20)}).encode()
    async with http.post(post, data=big, headers=headers) as response:
        await check_error(response, 413)
    packed = {**headers, "content-encoding": "gzip"}
    async with http.post(post, data=b"x", headers=packed) as response:
        await check_error(response, 415)
    async with http.post(f"{url}/v1/embeddings", json={}, headers=headers) as response:
        await check_error(response, 404)
    async with http.get(post, headers=headers) as response:
        await check_error(response, 405)
    async with http.get(f"{url}/v1/models/gpt-7", headers=headers) as response:
        await check_error(response, 404)
    for wrong in ({}, {"authorization": "Bearer guess"}, {"authorization": "Basic Y2xpZW50"}):
        async with http.post(post, json={"prompt": "x"}, headers=wrong) as response:
            await check_error(response, 401)
        async with http.get(f"{url}/v1/models", headers=wrong) as response:
            await check_error(response, 401)


@pytest.mark.e2e
async def test_the_official_client_understands_wrong_keys(target: Any) -> None:
    url, headers = target
    key = headers["authorization"].removeprefix("Bearer ")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as good:
        assert [m.id async for m in good.models.list()] == ["demo"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="guess", max_retries=0) as bad:
        with pytest.raises(openai.AuthenticationError):
            await bad.completions.create(model="demo", prompt="x")


# Connections -----------------------------------------------------------------------------------


def host_port(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def request_bytes(headers: dict[str, str], body: bytes) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


GARBAGE: dict[str, bytes] = {
    "random bytes": bytes((i * 197 + i // 7) % 256 for i in range(4000)),
    "TLS": bytes.fromhex("16030100a5010000a10303") + b"\x55" * 160,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200,
    "bad length": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n"
    b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "endless header": b"GET / HTTP/1.1\r\nx: " + b"a" * 300_000,
    "nulls": b"\0" * 10_000,
}


async def poke(address: tuple[str, int], data: bytes) -> None:
    """Sends `data`, then hangs up; whatever comes back is ignored."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(data)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(0.2):
                await writer.drain()
                await reader.read()
        writer.transport.abort()


@pytest.mark.e2e
@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_on_every_port(
    cluster: Any, bystander: Bystander, demo_checkpoint: Path, name: str
) -> None:
    grpc_port = cluster.decodes[0].service.ready_info["grpc_address"]
    peer = await handshake(cluster.prefills[0].address, stranger(demo_checkpoint))
    kv_port = peer.prefill.ranks[0].addresses[0]
    prefill_metrics = cluster.prefills[0].metrics_url.removesuffix("/metrics")
    addresses = [cluster.url, cluster.decodes[0].url, grpc_port, cluster.prefills[0].address]
    for address in (*addresses, prefill_metrics, kv_port):
        await poke(host_port(address), GARBAGE[name])
    await bystander.check()


@pytest.mark.e2e
async def test_clients_that_leave_at_any_moment(
    cluster: Any, target: Any, bystander: Bystander
) -> None:
    """Clients leave after a part of the head, of the body, before and in the middle of the
    answer."""
    url, headers = target
    body = json.dumps({"prompt": [7] * 700, "max_tokens": 300, "stream": True}).encode()
    whole = request_bytes(headers, body)
    for length in (1, 20, 60, len(whole) - len(body), len(whole) - 1):
        await _leave_after(url, whole[:length], 0.02)
    for pause_s in (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4):
        await asyncio.gather(*(_leave_after(url, whole, pause_s) for _ in range(3)))
    await bystander.check()


async def _leave_after(url: str, data: bytes, pause_s: float) -> None:
    _, writer = await asyncio.open_connection(*host_port(url))
    writer.write(data)
    await asyncio.sleep(pause_s)
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.mark.e2e
async def test_clients_that_do_not_read(cluster: Any, target: Any, bystander: Bystander) -> None:
    """Their answers fill the socket's buffers; nobody else waits for them."""
    url, headers = target
    wish = {"prompt": [7] * 20, "max_tokens": 1500, "stream": True, "ignore_eos": True, "n": 4,
            "logprobs": 20}  # fmt: skip
    writers = []
    for _ in range(3):
        reader, writer = await asyncio.open_connection(*host_port(url), limit=1024)
        writer.write(request_bytes(headers, json.dumps(wish).encode()))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writers.append(writer)
    await bystander.check()
    for writer in writers:
        writer.transport.abort()


# gRPC ------------------------------------------------------------------------------------------


def bytes_call(channel: Any, method: str, *, streams: bool = False) -> Any:
    """Returns a stub that sends and receives bytes as they are."""
    make = channel.unary_stream if streams else channel.unary_unary
    return make(f"/tandem.v1.{method}", request_serializer=None, response_deserializer=None)


def stranger(model: Path) -> KVPeer:
    """Runs a decode node that fits, as far as anybody can tell."""
    settings = EngineSettings(model=str(model), served_model_name="demo", device="cpu")
    pending = settings.to_engine_config("kv_consumer")
    config = identified(pending, model_hash_of(pending.model))
    return KVPeer(engine_id="stranger", epoch=1, layout=config.kv_layout)


async def handshake(address: str, us: KVPeer) -> prefill_pb2.HandshakeReply:
    request = prefill_pb2.HandshakeRequest(decode=peer_to_proto(us)).SerializeToString()
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await bytes_call(channel, "Prefill/Handshake")(request, timeout=60)
    return prefill_pb2.HandshakeReply.FromString(reply)


async def status_of(call: Any) -> grpc.StatusCode:
    """Returns how a call ends, whatever it says before."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def prefill_request(epoch: int, **changes: Any) -> bytes:
    sampling = SamplingParams(max_tokens=8, **changes.pop("sampling", {}))
    fields = {
        "transfer_id": secrets.token_hex(16),
        "expected_epoch": epoch,
        "prompt_token_ids": [7] * 50,
        "spec": encode_spec(RequestSpec([], sampling)),
        **changes,
    }
    return prefill_pb2.PrefillRequest(**fields).SerializeToString()


BAD_PREFILLS: list[dict[str, Any]] = [
    {"transfer_id": ""},
    {"transfer_id": "../../etc/passwd"},
    {"prompt_token_ids": []},
    {"prompt_token_ids": [2**32 - 1]},
    {"prompt_token_ids": [7] * 5000},
    {"sampling": {"temperature": float("nan")}},
    {"sampling": {"min_p": -1.0}},
    {"sampling": {"top_k": -5}},
    {"sampling": {"logit_bias": {2**32 - 1: 1.0}}},
    {"sampling": {"logit_bias": {1: float("inf")}}},
    {"sampling": {"stop_token_ids": (2**31,)}},
    {"spec": b"\x01" + b"\xdd\xff\xff\xff\xff"},
]


@pytest.mark.e2e
async def test_bad_prefill_calls(cluster: Any, bystander: Bystander, demo_checkpoint: Path) -> None:
    address = cluster.prefills[0].address
    epoch = (await handshake(address, stranger(demo_checkpoint))).prefill.epoch
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    async with grpc.aio.insecure_channel(address) as channel:
        prefill = bytes_call(channel, "Prefill/Prefill", streams=True)
        for changes in BAD_PREFILLS:
            assert await status_of(prefill(prefill_request(epoch, **changes))) is invalid, changes
        other = await status_of(prefill(prefill_request(epoch + 1)))
        assert other is grpc.StatusCode.FAILED_PRECONDITION
        for spec in (b"", b"\xff"):
            unknown = await status_of(prefill(prefill_request(epoch, spec=spec)))
            assert unknown is grpc.StatusCode.FAILED_PRECONDITION, "a version that is not known"
        for raw in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f"):
            assert await status_of(prefill(raw)) is not grpc.StatusCode.OK
        huge = prefill_request(epoch, prompt_token_ids=[2**31] * (8 << 20))
        assert await status_of(prefill(huge)) is invalid, "32 MiB of tokens, in one message"
        for pause_s in (0.0, 0.001, 0.01, 0.05, 0.2):
            left = prefill(prefill_request(epoch))
            await asyncio.sleep(pause_s)
            left.cancel()
    await bystander.check()


@pytest.mark.e2e
async def test_bad_pulls(cluster: Any, bystander: Bystander, demo_checkpoint: Path) -> None:
    """Pulls name a transfer that exists, none, and everything."""
    us = stranger(demo_checkpoint)
    peer = (await handshake(cluster.prefills[0].address, us)).prefill
    async with (
        grpc.aio.insecure_channel(cluster.prefills[0].address) as node,
        grpc.aio.insecure_channel(peer.ranks[0].addresses[0]) as channel,
    ):
        real = secrets.token_hex(16)
        prefill = bytes_call(node, "Prefill/Prefill", streams=True)
        exported = prefill(prefill_request(peer.epoch, transfer_id=real))
        await exported.read()
        pull = bytes_call(channel, "KVTransfer/PullKV", streams=True)
        whole = {"transfer_id": real, "epoch": peer.epoch, "num_streams": 1, "num_tokens": 50,
                 "tp_size": us.layout.tp_size}  # fmt: skip
        for changes in (
            {"transfer_id": "x"},
            {"epoch": 1},
            {"rank": 100},
            {"tp_size": 2**31},
            {"tp_size": 0},
            {"stream_index": 1},
            {"num_streams": 0},
            {"num_tokens": 2**32 - 1},
            {"num_tokens": 0},
        ):
            request = pb.PullRequest(**{**whole, **changes}).SerializeToString()
            call = pull(request, timeout=60)
            assert await status_of(call) not in OF_A_BUG, changes
        unknown = pull(
            pb.PullRequest(**{**whole, "transfer_id": "0" * 32}).SerializeToString(), timeout=0.5
        )
        assert await status_of(unknown) is grpc.StatusCode.DEADLINE_EXCEEDED
        foreign = {**whole, "repeat_chunks": [2**32 - 1] * 1000}
        ended = await status_of(pull(pb.PullRequest(**foreign).SerializeToString(), timeout=60))
        assert ended is grpc.StatusCode.INVALID_ARGUMENT
        assert await status_of(pull(b"\xff" * 60, timeout=60)) is not grpc.StatusCode.OK
        exported.cancel()
    await bystander.check()


OF_A_BUG = (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL,
            grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("interval_s", [-1.0, 0.0, 1e-300, float("nan"), float("inf")])
async def test_odd_watch_intervals(cluster: Any, interval_s: float) -> None:
    grpc_address = cluster.decodes[0].service.ready_info["grpc_address"]
    for address in (cluster.prefills[0].address, grpc_address):
        async with grpc.aio.insecure_channel(address) as channel:
            watch = bytes_call(channel, "NodeStatus/Watch", streams=True)
            call = watch(node_pb2.WatchRequest(interval_s=interval_s).SerializeToString())
            reports = [await call.read() for _ in range(1 if interval_s > 1 else 2)]
            sequence = [node_pb2.NodeLoad.FromString(report).sequence for report in reports]
            assert sequence == sorted(set(sequence))
            call.cancel()
