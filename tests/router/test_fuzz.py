"""Requests that nobody would write: a router before a decode node's real HTTP application. Every
answer is a documented one, and nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from decode_node.http.openapi import openapi_document
from tests.decode_node.http_node import HttpNode, http_node, live
from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.fakes import FakeDecodeNode

DOCUMENT = openapi_document()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]


TAKEN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/responses/compact": {"input": "a"},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/messages/render": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses/render": {"input": "a"},
    "/v1/chat/completions/derender": {
        "generate_response": {"choices": [{"token_ids": [7]}]},
        "chat_request": {"messages": [{"role": "user", "content": "a"}]},
    },
    "/v1/completions/derender": {
        "generate_responses": [{"choices": [{"token_ids": [7]}]}],
        "completion_request": {"prompt": "a"},
    },
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [7]},
    "/inference/v1/generate": {"token_ids": [7], "sampling_params": {"max_tokens": 2}},
    "/generate": {"input_ids": [7], "sampling_params": {"max_new_tokens": 2}},
}
"""Bodies that every node takes."""
MOST_USED = ("/v1/completions", "/v1/chat/completions")


def some_fields(case: Any, count: int) -> None:
    """Leaves only the first `count` fields of what was drawn, over a body that is taken: of bodies
    that are drawn whole, hardly one gets beyond the checks."""
    if isinstance(case.body, dict):
        drawn = itertools.islice(case.body.items(), count)
        case.body = {**TAKEN[case.path], **dict(drawn)}


class RealHttpNode(FakeDecodeNode):
    """Reports its load as the fake one does; HTTP is somebody else's."""

    async def start(self) -> Any:
        await super().start()
        await self.stop_http()
        return self


async def router_before(cluster: Cluster, url: str) -> RunningRouter:
    node = RealHttpNode("real")
    node.status.load.model_name = "tiny"
    await cluster._start(node)
    node.port = int(url.rpartition(":")[2])
    return await cluster.router(node)


async def check_alive(router: RunningRouter, node: HttpNode) -> None:
    async with router.post({"prompt": "a", "max_tokens": 2}) as response:
        assert response.status == 200
    await node.check_empty()
    router.assert_empty()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
async def test_every_answer_is_a_documented_one(cluster: Cluster, operation: Any) -> None:
    responses = operation.definition.raw["responses"]
    form = responses["400"]["content"]["application/json"]["schema"]
    error = jsonschema.Draft202012Validator({**form, "components": DOCUMENT["components"]})

    # A summary is asked for in some words, and has to end by itself.
    async with http_node(context=1024, scripts=["so"]) as node, live(node) as url:
        router = await router_before(cluster, url)

        @given(case=operation.as_strategy())
        @settings(
            max_examples=60 if operation.path in MOST_USED else 30,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            number = next(numbers)
            if number % 2 == 0:
                some_fields(case, number // 2)
            response = case.call(base_url=router.url, timeout=TIMEOUT_S)
            status = str(response.status_code)
            seen.add(status)
            assert status in responses, (status, response.content[:300])
            if status != "200":
                error.validate(json.loads(response.content))

        seen: set[str] = set()
        numbers = itertools.count()
        await asyncio.to_thread(ask)
        assert "200" in seen
        assert "400" in seen or operation.method == "get"
        await check_alive(router, node)


GOOD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"content-length: 52\r\n\r\n"
    b'{"prompt": "hello", "max_tokens": 3, "stream": true}'
)
TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff", b"content-length: 5\r\n", b"host: b\r\n",
    b"transfer-encoding: chunked\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"-1", b"1e9",
    b"expect: 100-continue\r\n", b"upgrade: websocket\r\nconnection: upgrade\r\n", b"HTTP/9.9",
    b"GET / HTTP/1.1\r\n\r\n", b"x-tandem-resume: 3\r\n", b"x-tandem-journal: 1\r\n", b"{", b'"',
    b"[" * 500, b"\xed\xa0\x80", b"NaN", b"9" * 400,
)  # fmt: skip


def mutated(rng: random.Random) -> bytes:
    data = bytearray(GOOD)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at:at] = rng.choice(TOKENS)
            case 1:
                del data[at : at + rng.randint(1, 20)]
            case 2 if at < len(data):
                data[at] = rng.randrange(256)
            case 3:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
            case _:
                data[at:at] = rng.randbytes(rng.randint(1, 30))
    return bytes(data)


async def answers_to(router: RunningRouter, requests: list[bytes]) -> list[bytes]:
    """Returns what is said to each until two that came after them have their whole answers: who is
    not answered by then waits for what we do not send, or shall go on when we have left."""
    host, port = router.url.removeprefix("http://").split(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in requests]
    for (_, writer), data in zip(connections, requests, strict=True):
        writer.write(data)
    ends = {GOOD: b"[DONE]", b"?\r\n\r\n": b"HTTP/1.1 400 "}
    whole = [await whole_answer(host, int(port), data, end) for data, end in ends.items()]
    parts = await asyncio.gather(*(what_is_there(reader) for reader, _ in connections))
    for _, writer in connections:
        writer.close()
    return whole + parts


async def whole_answer(host: str, port: int, data: bytes, end: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    async with asyncio.timeout(TIMEOUT_S):
        answer = await reader.readuntil(end)
    writer.close()
    return answer


async def what_is_there(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(0.1):
            while part := await reader.read(1 << 16):
                answer += part
    return answer


async def test_no_bytes_hurt_the_http_parser_s_path(cluster: Cluster) -> None:
    rng = random.Random(7)
    async with http_node() as node, live(node) as url:
        router = await router_before(cluster, url)
        seen: Counter[bytes] = Counter()
        for _ in range(6):
            for answer in await answers_to(router, [mutated(rng) for _ in range(100)]):
                lines = answer.split(b"\r\n")
                seen.update(line.split(b" ")[1] for line in lines if line.startswith(b"HTTP/1.1 "))
        assert seen.keys() <= {
            b"100",
            b"200",
            b"400",
            b"404",
            b"405",
            b"408",
            b"413",
            b"415",
            b"431",
            b"501",
            b"505",
        }, seen
        assert seen[b"200"] and seen[b"400"], seen
        await eventually(lambda: router.num_open == 0)
        await check_alive(router, node)
