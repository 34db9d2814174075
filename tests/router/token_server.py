"""A decode node without an engine, whose answers show any token that is lost, repeated or changed.

Token i of choice c is a function of (prompt, seed, c, i) alone, and its text names i: `expected`
says what a client must get. It keeps a journal and resumes as a real node does.

As a process (`python -m tests.router.token_server GAP_S [PORTS]`) it prints its ports and serves
until it is told to stop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.router.fakes import FakeDecodeNode

DONE = b"data: [DONE]\n\n"
COMPLETE = b":.\n\n"
"""Ends a stream of an API whose clients do not know `[DONE]`, for a router."""

Fault = Callable[["Writer"], Awaitable[None]]
"""Called before each event is written; may do anything to the connection or the process."""


def token(prompt: object, seed: int, choice: int, index: int) -> int:
    key = json.dumps([prompt, seed, choice, index]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest())


def piece(prompt: object, seed: int, choice: int, index: int) -> str:
    return f"{index}:{token(prompt, seed, choice, index):x} "


def expected(body: dict[str, Any], choice: int = 0) -> str:
    count, seed = body["max_tokens"], body["seed"]
    return "".join(piece(body["prompt"], seed, choice, i) for i in range(count))


@dataclass
class Writer:
    """Writes one answer. `num_tokens`: of the whole answer, other nodes' included."""

    request: web.Request
    response: web.StreamResponse
    is_stream: bool
    number: int = 0
    num_tokens: int = 0
    num_events: int = 0

    def line(self, *entry: object) -> bytes:
        self.number += 1
        return f": {self.number - 1} {json.dumps(entry, separators=(',', ':'))}\n".encode()

    async def write(self, data: bytes) -> None:
        self.num_events += 1
        await self.response.write(data)

    def abort(self) -> None:
        assert self.request.transport is not None
        self.request.transport.abort()
        raise ConnectionResetError


@dataclass
class TokenHandler:
    """Handler for a `FakeDecodeNode`. `gap_s`: between tokens. `forgets`: begins at the start
    where it should resume. `end`: what ends a stream. `weights`: other ones tell other tokens."""

    gap_s: float = 0.0
    fault: Fault | None = None
    forgets: bool = False
    end: bytes = DONE
    weights: str = ""
    is_stopping: bool = False
    """Refuses new answers, and hands over those that are open."""
    resumed_from: list[int] = field(default_factory=list)
    """Tokens that resumed requests came with."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if self.is_stopping:
            return web.json_response({"error": {"message": "stopping"}}, status=503)
        raw = await request.read()
        given: list[list[int]] | None = None
        number = 0
        if offset := request.headers.get("x-tandem-resume"):
            entries = json.loads(raw[int(offset) :])
            raw, number = raw[: int(offset)], len(entries)
            given = [[] for _ in entries[0][2]]
        if self.forgets:
            given, number = None, 0
        if given is not None:
            for entry in entries[1:]:
                if entry[0] == "tokens":
                    given[entry[1]] += entry[2]
        body = json.loads(raw)
        if self.weights:
            body["prompt"] = [self.weights, body["prompt"]]
        seed = body.get("seed")
        if seed is None:
            seed = entries[0][2][0] if given else random.getrandbits(30)
        body["seed"] = seed
        if given is None:
            given = [[] for _ in range(body.get("n") or 1)]
        else:
            self.resumed_from.append(sum(map(len, given)))
            assert given == [
                [token(body["prompt"], seed, c, i) for i in range(len(tokens))]
                for c, tokens in enumerate(given)
            ], "the journal is not what was told"
        is_stream = bool(body.get("stream"))
        kind = "text/event-stream; charset=utf-8" if is_stream else "application/json"
        wants_journal = request.headers.get("x-tandem-journal") == "1"
        if not wants_journal and not is_stream:
            return web.json_response(self._body(body))
        headers = {"content-type": kind}
        if wants_journal:
            headers["x-tandem-journal"] = str(number)
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        writer = Writer(request, response, is_stream, number, sum(map(len, given)))
        await self._stream(writer, body, [len(tokens) for tokens in given], wants_journal)
        return response

    async def _stream(
        self, writer: Writer, body: dict[str, Any], done: list[int], wants_journal: bool
    ) -> None:
        prompt, seed = body["prompt"], body["seed"]
        for index in range(min(done), body["max_tokens"]):
            for choice in range(len(done)):
                if index < done[choice]:
                    continue
                if self.fault is not None:
                    await self.fault(writer)
                if self.is_stopping and wants_journal:
                    await writer.write(b':! 503\ndata: {"error":{"message":"stopping"}}\n\n')
                    return
                lines = b""
                if wants_journal:
                    if writer.number == 0:
                        lines += writer.line("start", 1, [seed] * len(done))
                    lines += writer.line("tokens", choice, [token(prompt, seed, choice, index)])
                writer.num_tokens += 1
                text = piece(prompt, seed, choice, index)
                chunk = json.dumps({"choices": [{"index": choice, "text": text}]}).encode()
                data = b"data: " + chunk + b"\n" if writer.is_stream else b""
                await writer.write(lines + data + b"\n")
                if self.gap_s:
                    await asyncio.sleep(self.gap_s)
        if not writer.is_stream:
            await writer.write(b"data: " + json.dumps(self._body(body)).encode() + b"\n\n")
        await writer.write(self.end if writer.is_stream else DONE)

    def _body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "seed": body["seed"],
            "choices": [{"index": c, "text": expected(body, c)} for c in range(body.get("n") or 1)],
        }


def texts(answer: str, num_choices: int = 1) -> list[str]:
    """Returns the tokens of a complete stream, by choice; the framing must be exact, and nothing
    inside show."""
    assert answer.endswith("data: [DONE]\n\n"), answer[-200:]
    *events, _ = answer.removesuffix("\n\n").split("\n\n")
    found = [""] * num_choices
    for event in events:
        assert event.startswith("data: ") and "\n" not in event, event
        for choice in json.loads(event[6:])["choices"]:
            found[choice["index"]] += choice["text"]
    return found


async def main(gap_s: float, port: int = 0, status_port: int = 0) -> None:
    """SIGTERM: drains, hands over, ends."""
    handler = TokenHandler(gap_s=gap_s)
    node = FakeDecodeNode("token-server", handler)
    node.port, node.status_port = port, status_port
    await node.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(json.dumps({"port": node.port, "status_port": node.status_port}), flush=True)
    await stop.wait()
    await node.status.change(draining=True)
    await asyncio.sleep(0.2)
    handler.is_stopping = True
    while node.num_open:
        await asyncio.sleep(0.01)
    await node.stop()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), *map(int, sys.argv[2:])))
