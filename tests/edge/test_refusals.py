"""Requests that are refused while they are parsed: in tiny chunks, without a key; and what reads
bring of them."""

from __future__ import annotations

import pytest

from edge.http.bodies import body_framing
from tests.edge.left_behind import garbage_is_kept, left_behind
from tests.edge.test_guarded_connections import JSON_POST, KEY, OFFER, read_end, service


@pytest.mark.parametrize("offer", [b"", OFFER], ids=["plain", "offered"])
async def test_tiny_chunks_are_refused_and_others_are_not(
    offer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_framing, "_SPARE_BYTES", 1600)
    head = JSON_POST + (offer or KEY) + b"transfer-encoding: chunked\r\n\r\n"
    async with service() as running:
        reader, writer = await running.connect()
        for size, num_chunks in ((1, 90), (16, 60), (1, 90)):  # Each body has spare bytes.
            writer.write(head + b"%x\r\n%b\r\n" % (size, b"1" * size) * num_chunks + b"0\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"ok")
        assert running.bodies == [b"1" * 90, b"1" * 960, b"1" * 90]
        reader, writer = await running.connect(head + b"1\r\n1\r\n" * 50_000)
        answer = await read_end(reader)
        assert b" 400 " in answer and b"less than 16 bytes" in answer
        writer.close()
        assert len(running.bodies) == 3


async def test_reads_are_small_while_much_waits_to_be_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service() as running:
        reads = running.protocol.open_connections.reads
        sizes, buffer = set[int](), reads.buffer

        def noted() -> memoryview:
            sizes.add(len(buffer()))
            return buffer()

        monkeypatch.setattr(reads, "buffer", noted)
        pipelined = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 900
        for num_held in (0, 4 << 20):
            reads.num_held += num_held
            reader, writer = await running.connect(pipelined)
            for _ in range(900):
                await reader.readuntil(b"ok")
            writer.close()
            await running.until_open(0)
            assert reads.num_held == num_held
        assert sizes == {32 << 10, 4 << 10}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\nhost: b\r\n" + KEY + b"\r\n",
        b"GET /x HTTP/1.1\r\na: " + b"b" * 20_000 + b"\r\n\r\n",
        JSON_POST + KEY + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 10_000,
        JSON_POST + KEY + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n1\r\n" * 500,
        b"no request\r\n\r\n",
    ],
    ids=["no key", "two hosts", "large", "trailers", "tiny chunks", "no request"],
)
async def test_what_is_refused_leaves_nothing_to_the_collector(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_framing, "_SPARE_BYTES", 1600)
    async with service() as running:

        async def once() -> None:
            reader, writer = await running.connect(sent)
            assert b"HTTP/1.1 4" in await read_end(reader)
            writer.close()
            await running.until_open(0)

        await once()
        with garbage_is_kept():
            await once()
            await once()
            assert not left_behind()
