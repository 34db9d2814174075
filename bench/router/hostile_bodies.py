#!/usr/bin/env python3
"""Measures how long one client's body silences all others: the longest gap of another stream.

A router before a token server, and a decode node that computes a tiny model on the processor, each
a process of its own. One client reads streams all the time; others post one hostile body after
the other. The first row posts a harmless body: what is there is the machine's.

    python -m bench.router.hostile_bodies
    python -m bench.router.hostile_bodies --tree ../older --name hostile_bodies_before
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from bench.arguments import parser_of
from bench.record import write_result
from bench.router.processes import child, port_of, run_token_server, running
from cli.local_cluster.cluster import DEMO_CHECKPOINT

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SIZE = (8 << 20) - 4096
LIMIT_MS = 100.0
_SETTLE_S = 0.3


def _filled(head: bytes, item: bytes, tail: bytes, count: int | None = None) -> bytes:
    """Fills a body of `SIZE` bytes with `item` between `head` and `tail`."""
    count = (SIZE - len(head) - len(tail)) // len(item) if count is None else count
    return head + item * count + tail


def _messages(item: bytes, last: bytes, count: int | None = None) -> bytes:
    return _filled(b'{"max_tokens": 1, "messages": [', item + b",", last + b"]}", count)


def _prompt(item: bytes, count: int | None = None) -> bytes:
    return _filled(b'{"max_tokens": 1, "prompt": [', item + b",", item + b"]}", count)


def _field(name: bytes, item: bytes, count: int | None = None) -> bytes:
    head = b'{"max_tokens": 1, "prompt": [5], "%b": [' % name
    return _filled(head, item + b",", item + b"]}", count)


def _structured(name: str, value: object) -> bytes:
    return json.dumps({"max_tokens": 1, "prompt": [5], name: value}).encode()


def _nested(depth: int) -> dict[str, object]:
    """Returns a schema whose options double at each level."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {
            "oneOf": [{"properties": {"a": schema, "k": {"const": kind}}} for kind in range(2)]
        }
    return schema


_CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "x"\n'
"""Overflows the stack of the process that compiles it."""
USER = b'{"role": "user", "content": "hi"}'
BODIES: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "harmless": (COMPLETIONS, lambda: b'{"prompt": [5], "max_tokens": 1}'),
    "messages: zeros": (CHATS, lambda: _messages(b"0", b"0")),
    "messages: a million zeros": (CHATS, lambda: _messages(b"0", b"0", 1_000_000)),
    "messages: empty objects": (CHATS, lambda: _messages(b"{}", b"{}")),
    "messages: 30,000": (CHATS, lambda: _messages(USER, USER, 30_000)),
    "messages: 4,096": (CHATS, lambda: _messages(USER, USER, 4_095)),
    "one long message": (
        CHATS,
        lambda: _filled(b'{"messages": [{"role": "user", "content": "', b"a dog ", b'"}]}'),
    ),
    "tools: 20,000": (
        CHATS,
        lambda: _filled(
            b'{"messages": [' + USER + b'], "tools": [', b'{"type": "function"},', b"0]}", 20_000
        ),
    ),
    "prompt: lists of one": (COMPLETIONS, lambda: _prompt(b"[5]")),
    "prompt: 30,000 lists of one": (COMPLETIONS, lambda: _prompt(b"[5]", 30_000)),
    "prompt: 60,000 texts": (COMPLETIONS, lambda: _prompt(b'"ab"', 60_000)),
    "prompt: a million ids": (COMPLETIONS, lambda: _prompt(b"12345", 1_000_000)),
    "prompt: one long text": (
        COMPLETIONS,
        lambda: _filled(b'{"prompt": "', b"hello world ", b'"}'),
    ),
    "prompt: escapes": (COMPLETIONS, lambda: _filled(b'{"prompt": "', b"\\u0041", b'"}')),
    "user: nested lists": (COMPLETIONS, lambda: _field(b"user", b"[[]]")),
    "user: 10,000 nested lists": (COMPLETIONS, lambda: _field(b"user", b"[[]]", 10_000)),
    "user: hard fractions": (COMPLETIONS, lambda: _field(b"user", b"1.2345678901234567e-300")),
    "user: deep": (COMPLETIONS, lambda: _filled(b'{"user": ', b"[", b"")),
    "stop: texts": (COMPLETIONS, lambda: _field(b"stop", b'"ab"')),
    "stop_token_ids: a million": (
        COMPLETIONS,
        lambda: _field(b"stop_token_ids", b"5", 1_000_000),
    ),
    "logit_bias: 300,000": (
        COMPLETIONS,
        lambda: (
            b'{"prompt": [5], "logit_bias": {'
            + b",".join(b'"%d": 1' % i for i in range(300_000))
            + b"}}"
        ),
    ),
    "unknown names: 500,000": (
        COMPLETIONS,
        lambda: b"{" + b",".join(b'"k%06d": 1' % i for i in range(500_000)) + b"}",
    ),
    "one name, again and again": (COMPLETIONS, lambda: _filled(b"{", b'"user":0,', b'"n":1}')),
    "one huge integer": (COMPLETIONS, lambda: _filled(b'{"seed": ', b"1", b"}")),
    "one huge fraction": (COMPLETIONS, lambda: _filled(b'{"seed": 0.', b"1", b"}")),
    "schema: multipleOf a prime": (
        COMPLETIONS,
        lambda: _structured("guided_json", {"type": "integer", "multipleOf": 999_983}),
    ),
    "schema: oneOf, 10 deep": (COMPLETIONS, lambda: _structured("guided_json", _nested(10))),
    "schema: 3,000 names": (
        COMPLETIONS,
        lambda: _structured("guided_json", {"enum": [f"name {i}" for i in range(3000)]}),
    ),
    "regex: a million": (
        COMPLETIONS,
        lambda: _structured("guided_regex", "(a{1000}){1000}(.*b){200}"),
    ),
    "grammar: 4,000 rules": (COMPLETIONS, lambda: _structured("guided_grammar", _CHAIN)),
    "blanks": (COMPLETIONS, lambda: _filled(b'{"prompt": ', b" ", b"5}")),
}


@dataclass
class Silence:
    """Watches chunks of streams that follow each other."""

    longest_s: float = 0.0
    last_at: float = field(default_factory=time.monotonic)

    def chunk(self) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self.last_at)
        self.last_at = now

    def reset(self) -> None:
        self.longest_s, self.last_at = 0.0, time.monotonic()


@dataclass(frozen=True)
class Row:
    service: str
    body: str
    size: int
    status: int
    silence_ms: float
    answered_ms: float


async def read_streams(
    client: aiohttp.ClientSession, port: int, silence: Silence, reading: asyncio.Event
) -> None:
    """Reads streams for ever. The time between two streams counts as silence, too."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True, "seed": 1}
    while True:
        url = f"http://127.0.0.1:{port}{COMPLETIONS}"
        async with client.post(url, json=body) as response:
            async for _ in response.content.iter_any():
                silence.chunk()
                reading.set()


def post(port: int, path: str, body: bytes) -> int:
    """Returns the status; 0 when the connection broke."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


async def measure(service: str, port: int, repeats: int, at_once: int) -> list[Row]:
    silence, reading = Silence(), asyncio.Event()
    rows = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        streams = asyncio.create_task(read_streams(client, port, silence, reading))
        await reading.wait()
        for name, (path, make) in BODIES.items():
            body = await asyncio.to_thread(make)
            status, worst_s, answered_s = 0, float("inf"), float("inf")
            for _ in range(repeats):
                await asyncio.sleep(_SETTLE_S)
                silence.reset()
                started_at = time.monotonic()
                posts = (asyncio.to_thread(post, port, path, body) for _ in range(at_once))
                status = max(await asyncio.gather(*posts))
                answered_s = min(answered_s, time.monotonic() - started_at)
                await asyncio.sleep(_SETTLE_S)
                silence.chunk()
                worst_s = min(worst_s, silence.longest_s)
            rows.append(Row(service, name, len(body), status, ms(worst_s), ms(answered_s)))
            print(f"{service:12} {name:28} {status:4} {rows[-1].silence_ms:9.1f} ms", flush=True)
            if streams.done():
                streams.result()
        streams.cancel()
    return rows


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def measure_router(tree: Path, repeats: int, at_once: int) -> list[Row]:
    ports = multiprocessing.get_context("spawn").Queue()
    with child(run_token_server, ports, 0.01):
        status_port, port = ports.get(timeout=30), ports.get(timeout=30)
        entry = f"127.0.0.1:{port}/{status_port}"
        with running(tree, "router", "--decode", entry) as (_, ready):
            time.sleep(1.0)
            return asyncio.run(measure("router", port_of(ready), repeats, at_once))


def measure_node(tree: Path, repeats: int, at_once: int) -> list[Row]:
    args = ("--model", str(DEMO_CHECKPOINT), "--device", "cpu")
    with running(tree, "decode_node", *args) as (_, ready):
        return asyncio.run(measure("decode node", port_of(ready), repeats, at_once))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="source tree to measure")
    parser.add_argument("--name", default="hostile_bodies", help="name of the result")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many is kept")
    parser.add_argument("--at-once", type=int, default=1, help="clients that post the same body")
    args = parser.parse_args()
    tree = args.tree.resolve()
    rows = measure_router(tree, args.repeats, args.at_once)
    rows += measure_node(tree, args.repeats, args.at_once)
    write_result(args.name, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
