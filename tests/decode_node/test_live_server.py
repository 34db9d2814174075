"""A real uvicorn on loopback: the official client, disconnects, slow readers, raw bytes."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import openai
import pytest

from engine.node.grpc_server import PortInUse
from engine.node.http_server import listen
from tests.decode_node.decode_fakes import token_at, until
from tests.decode_node.http_node import MODEL, http_node, live

MESSAGES = [{"role": "user", "content": "the dog"}]


async def test_the_official_client_works_unchanged() -> None:
    async with http_node(api_keys="key") as node, live(node) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        assert [model.id async for model in client.models.list()] == [MODEL]
        chat = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=6, seed=1, logprobs=True, top_logprobs=1
        )
        assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
        assert chat.choices[0].logprobs is not None
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=6,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert text == chat.choices[0].message.content
        assert usage == chat.usage
        prompt = [5, 6, 7]
        completion = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, seed=2, logprobs=1
        )
        expected = node.tokenizer.decode([token_at(3 + i, 2) for i in range(4)])
        assert completion.choices[0].text == expected
        streamed = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, seed=2, stream=True
        )
        assert "".join([part.choices[0].text async for part in streamed]) == expected
        await client.close()


async def test_whoever_may_get_may_ask_for_the_head() -> None:
    """The connection is whole afterwards."""
    async with http_node() as node, live(node) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/health", "/ready", "/ping", "/metrics", "/v1/models", f"/v1/models/{MODEL}"):
            head = await client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
        length = (await client.get("/v1/models")).headers["content-length"]
        assert (await client.head("/v1/models")).headers["content-length"] == length
        assert (await client.head("/v1/completions")).status_code == 405
        wish = {"connection": "Upgrade", "upgrade": "websocket"}
        assert (await client.get("/v1/responses", headers=wish)).status_code == 426


async def test_the_official_client_understands_our_errors() -> None:
    async with http_node(auto=False, api_keys="key") as node, live(node) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        stranger = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="x", temperature=-1)
        assert caught.value.param == "temperature"
        node.engine.on_generate = lambda fake: node.engine.produce(fake, 2)
        stream = await client.completions.create(
            model=MODEL, prompt=[5], stream=True, extra_body={"return_token_ids": True}
        )
        with pytest.raises(openai.APIError):
            async for _ in stream:
                node.engine.die()
        await client.close()
        await stranger.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_client_that_hangs_up_frees_everything(stream: bool, num_tokens: int) -> None:
    async with http_node(auto=False) as node, live(node) as url:
        body = {"prompt": [5], "max_tokens": 50, "stream": stream, "n": 2}
        node.nodes.on_call = lambda call: call.first_token()
        headers = {"x-prefiller-host-port": "a:1"}
        async with httpx.AsyncClient(base_url=url) as client:
            asking = asyncio.create_task(
                client.post("/v1/completions", json=body, headers=headers, timeout=60)
            )
            await node.engine.added(2)
            await node.nodes.called()
            for fake in node.engine.requests.values():
                await until(lambda fake=fake: fake.has_first_token, "token one")
                if num_tokens and not fake.has_kv:
                    node.engine.kv_arrives(fake)
                if num_tokens:
                    node.engine.produce(fake, num_tokens)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await until(lambda: all(f.aborted for f in node.engine.requests.values()), "aborts")
        metrics = await node.metrics()
        assert metrics['vllm:request_success_total{"finished_reason": "abort"}'] == 2


async def test_a_client_that_hangs_up_while_waiting_for_room() -> None:
    async with http_node(auto=False) as node, live(node) as url:
        blocker = node.proxy._credits.claim_now(96 * 8, 1)
        async with httpx.AsyncClient(base_url=url) as client:
            headers = {"x-prefiller-host-port": "a:1"}
            asking = asyncio.create_task(
                client.post("/v1/completions", json={"prompt": [5]}, headers=headers)
            )
            await until(lambda: node.proxy.num_queued == 1, "it waits")
            asking.cancel()
        await until(lambda: node.proxy.num_queued == 0, "it has left")
        blocker.release()
        assert not node.engine.requests


async def test_a_reader_that_never_reads_is_cut_off_alone() -> None:
    async with http_node(auto=False, send_timeout_s=0.3) as node, live(node) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(
            {"prompt": [5], "max_tokens": 250, "stream": True, "logprobs": 20, "n": 40}
        ).encode()
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=small, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        await node.engine.added(40)
        for fake in node.engine.requests.values():
            for _ in range(200):
                node.engine.produce(fake)
        await until(lambda: all(f.aborted for f in node.engine.requests.values()), "cut off")
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
        writer.close()
        del reader


async def test_raw_bytes_get_an_http_error() -> None:
    async with http_node() as node, live(node) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x00\xff nonsense\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_a_port_in_use_is_named() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(PortInUse, match=f"{port}.*choose another"):
        listen("127.0.0.1", port)
    listener.close()


async def test_a_client_without_a_key_gets_no_further_than_its_head() -> None:
    async with http_node(api_keys="key") as node, live(node) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
            b"content-type: application/json\r\ncontent-length: 99\r\n\r\n"
        )
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" in answer
        writer.close()


async def test_a_head_that_trickles_is_cut() -> None:
    async with http_node(header_timeout_s=0.2) as node, live(node) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /hea")
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
        writer.close()
