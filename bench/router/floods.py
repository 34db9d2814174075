#!/usr/bin/env python3
"""Measures what floods of valid requests cost others: how long another client waits, and memory.

Attackers are a process of their own, with 60 connections for some seconds; another client asks for
/health all the while and after, one request after the other. It is asked of

    router      one that runs alone, without nodes
    keys        the same, with keys, which attackers have not: only /health and /ready need none
    cluster     a router with a decode node, which gets what is a whole request
    decode      the API of a decode node
    probes      the port for metrics of a prefill node

Floods are of connections, of requests, and of bodies that are hard to read, one after the other.

Waits on a busy machine are also those of cores that others use. So each flood is measured twice: at
the service (`flooded`), and at a second one of its kind, while the first is asked (`beside`). And
of each wait there is what the service itself took (`own`): without the time in which its thread, or
the client, was ready to run and the kernel ran another thread on the core. Work that the thread
does counts, and so does waiting for another thread of the service.

Root can have it measured as on a quiet machine. Niceness alone does not do that where the kernel
shares cores out between sessions first (`sched_autogroup_enabled`):

    setsid -w sh -c 'echo -20 >/proc/self/autogroup; exec nice -n -20 python -m bench.router.floods'
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from bench.arguments import parser_of
from bench.figures import distribution_ms
from bench.record import write_result
from bench.router.processes import child, peak_rss_mib, port_of, running
from bench.serving.process_tree import own_cpu_seconds
from cli.local_cluster.cluster import DEMO_CHECKPOINT

Begun: TypeAlias = "multiprocessing.Queue[bool]"

_NUM_CONNECTIONS = 60
_GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
_CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_SIZE = 8_000_000
_MESSAGE = '{"role": "user", "content": "hi"}'
_CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "x"\n'
"""Overflows the stack of the process that compiles it."""


def _post(head: bytes, item: bytes, tail: bytes, count: int = 0) -> bytes:
    """Returns a whole request, whose body is as long as can be, or has this many items."""
    count = count or (_SIZE - len(head) - len(tail)) // len(item)
    return _request(head + item * count + tail)


def _request(body: bytes) -> bytes:
    path = b"chat/completions" if b'"messages"' in body[:99] else b"completions"
    return (
        b"POST /v1/%b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % (path, len(body))
    ) + body


def _list(field: str, item: str, count: int = 0) -> bytes:
    head = '{"max_tokens": 1, "prompt": [5], ' if field not in ("prompt", "messages") else "{"
    return _post(f'{head}"{field}": ['.encode(), f"{item},".encode(), f"{item}]}}".encode(), count)


def _structured(name: str, value: object) -> bytes:
    return _request(json.dumps({"max_tokens": 1, "prompt": [5], name: value}).encode())


def _nested(depth: int) -> dict[str, object]:
    """Returns a schema whose options double at each level."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        kinds = [{"properties": {"a": schema, "k": {"const": kind}}} for kind in range(2)]
        schema = {"oneOf": kinds}
    return schema


Flood: TypeAlias = Callable[[], tuple[bytes, bytes, float]]
FLOODS: dict[str, Flood] = {
    "nothing": lambda: (b"", b"", 0.0),
    "pipelined requests": lambda: (b"", _GET * 4000, 0.0),
    "pipelined scrapes": lambda: (b"", _GET.replace(b"health", b"metrics") * 1000, 0.0),
    "chunks of one byte": lambda: (_CHUNKED, b"1\r\n \r\n" * 20_000, 0.0),
    "chunks of sixteen bytes": lambda: (_CHUNKED, (b"10\r\n" + b" " * 16 + b"\r\n") * 5000, 0.0),
    "chunks of one byte in packets": lambda: (_CHUNKED, b"1\r\n \r\n" * 600, 0.02),
    "endless trailers": lambda: (_CHUNKED + b"0\r\n", b"a: b\r\n" * 20_000, 0.0),
    "long bodies of blanks": lambda: (b"", _post(b"", b" ", b""), 0.0),
    "long texts": lambda: (b"", _post(b'{"prompt": "', b"a dog\\n", b'"}'), 0.0),
    "long lists": lambda: (b"", _post(b'{"prompt": [', b"1234567,", b"1]}"), 0.0),
    "lists of strings": lambda: (b"", _list("stop", '"ab"'), 0.0),
    "prompts of one": lambda: (b"", _list("prompt", "[5]"), 0.0),
    "60,000 prompts": lambda: (b"", _list("prompt", '"ab"', 60_000), 0.0),
    "empty messages": lambda: (b"", _list("messages", "{}"), 0.0),
    "30,000 messages": lambda: (b"", _list("messages", _MESSAGE, 30_000), 0.0),
    "nested lists": lambda: (b"", _list("user", "[[]]"), 0.0),
    "deep lists": lambda: (b"", _post(b'{"user": ', b"[", b""), 0.0),
    "hard fractions": lambda: (b"", _list("user", "1.2345678901234567e-300"), 0.0),
    "huge integers": lambda: (b"", _post(b'{"seed": ', b"1", b"}"), 0.0),
    "one name again": lambda: (b"", _post(b"{", b'"user":0,', b'"n":1}'), 0.0),
    "schemas of primes": lambda: (b"", _structured("guided_json", {"multipleOf": 999_983}), 0.0),
    "nested schemas": lambda: (b"", _structured("guided_json", _nested(10)), 0.0),
    "expressions": lambda: (b"", _structured("guided_regex", "(a{1000}){1000}(.*b){200}"), 0.0),
    "chains of rules": lambda: (b"", _structured("guided_grammar", _CHAIN), 0.0),
    "connections alone": lambda: (_GET, b"", 0.0),
}
"""Names what is sent once on each connection, what again and again, and how many seconds apart."""
_MODEL = "--model", str(DEMO_CHECKPOINT), "--device", "cpu"
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "router": ("router",),
    "decode": ("decode_node", *_MODEL),
    "probes": ("prefill_node", *_MODEL, "--metrics-port", "0"),
}
_SERVICES = "router", "keys", "cluster", "decode", "probes"


async def _attack(port: int, name: str, until: float) -> None:
    """Sends without reading, begins anew where it is cut off, and hangs up each second."""
    first, again, pause_s = FLOODS[name]()
    while time.monotonic() < until:
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                async with asyncio.timeout(1.0):
                    writer.write(first)
                    while again and not writer.is_closing():
                        writer.write(again)
                        await writer.drain()
                        await asyncio.sleep(pause_s)
            finally:
                writer.transport.abort()


def run_attack(begun: Begun, port: int, name: str, seconds: float) -> None:
    async def attack() -> None:
        begun.put(True)
        until = time.monotonic() + seconds
        attacks = (_attack(port, name, until) for _ in range(_NUM_CONNECTIONS))
        await asyncio.gather(*attacks)

    asyncio.run(attack())


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(400):
        with contextlib.suppress(ConnectionRefusedError):
            return await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.05)
    raise SystemExit("the service did not begin to listen")


@dataclass(frozen=True, slots=True)
class _Wait:
    """Is one request's, in seconds. `own`: without waits for a core."""

    whole: float
    own: float


async def _waits(port: int, pid: int, seconds: float) -> list[_Wait]:
    """Asks again and again, at most each 10 ms."""
    reader, writer = await _connect(port)
    waits = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        started, waited = time.monotonic(), _wait_for_cores(pid)
        writer.write(_GET)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        whole = time.monotonic() - started
        waits.append(_Wait(whole, max(0.0, whole - (_wait_for_cores(pid) - waited))))
        await asyncio.sleep(0.01)
    writer.close()
    return waits


def _wait_for_cores(pid: int) -> float:
    """Returns the seconds in which the first thread of the service, or this one, was ready to run
    and did not."""
    return sum(
        int(Path(f"/proc/{each}/schedstat").read_text().split()[1]) / 1e9 for each in (pid, "self")
    )


@contextlib.contextmanager
def _service(kind: str) -> Iterator[tuple[int, int]]:
    """Yields the port and the process of a new one."""
    with contextlib.ExitStack() as stack:
        arguments = _ARGUMENTS.get(kind, _ARGUMENTS["router"])
        if kind == "keys":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            arguments += "--api-key-file", str(_key_file(Path(folder)))
        if kind == "cluster":
            _, node = stack.enter_context(running(*_ARGUMENTS["decode"]))
            grpc_port = str(node["grpc_address"]).rpartition(":")[2]
            arguments += "--decode", f"{node['address']}/{grpc_port}"
        process, ready = stack.enter_context(running(*arguments))
        yield ready["metrics_port"] if kind == "probes" else port_of(ready), process.pid


def _key_file(folder: Path) -> Path:
    file = folder / "keys.toml"
    digest = hashlib.sha256(b"key").hexdigest()
    file.write_text(f'[[tenants]]\nname = "bench"\nkeys = ["sha256:{digest}"]\n')
    return file


def _measure(kind: str, name: str, seconds: float) -> dict[str, object]:
    with _service(kind) as (port, pid), _service(kind) as (other_port, _):
        asyncio.run(_waits(other_port, pid, 1.0))
        asyncio.run(_waits(port, pid, 1.0))
        peak, cpu = peak_rss_mib(pid), own_cpu_seconds(pid)
        begun: Begun = multiprocessing.get_context("spawn").Queue()
        found: dict[str, object] = {"service": kind, "flood": name}
        for place, attacked in (("beside", other_port), ("flooded", port)):
            with child(run_attack, begun, attacked, name, seconds):
                begun.get()
                waits = asyncio.run(_waits(port, pid, seconds + 2))
            found[f"{place}_ms"] = distribution_ms([wait.whole for wait in waits])
            found[f"{place}_own_ms"] = distribution_ms([wait.own for wait in waits])
        return found | {
            "grown_mib": round(peak_rss_mib(pid) - peak, 1),
            "cpu_s": round(own_cpu_seconds(pid) - cpu, 2),
            "load_average": round(os.getloadavg()[0], 1),
        }


def main() -> int:
    parser = parser_of(__doc__, "router_floods")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each flood")
    parser.add_argument("--services", default=",".join(_SERVICES), help="which are attacked")
    parser.add_argument("--floods", default=",".join(FLOODS), help="which")
    args = parser.parse_args()
    rows = []
    for kind in args.services.split(","):
        for name in args.floods.split(","):
            rows.append(_measure(kind, name, args.seconds))
            print(json.dumps(rows[-1]), flush=True)
    print(f"written: {write_result(args.name, rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
