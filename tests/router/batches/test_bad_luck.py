"""Batches on disks that are full, slow, locked or spoiled, with nodes that die, and uploads that
mean no good: what was kept stays, each line is answered once, and memory is bounded."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Connection
from starlette.types import Message

from edge.http.bodies.body_room import BodyRoom
from edge.http.errors import RequestTimeout, RequestTooLarge
from router.batches.files.upload import Sender
from router.batches.lines import result_writer
from router.request.tenants import ANYONE
from tests.router.batches.conftest import client_of
from tests.router.batches.node import ChatNode, line
from tests.router.batches.test_batch_runs import Router, World, check_files
from tests.router.batches.test_batches import content, ended, make
from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.fakes import FakeDecodeNode

TEXTS = [f"t{i}" for i in range(12)]


async def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, Router, str]:
    """Returns a batch whose requests are at nodes."""
    monkeypatch.setattr(result_writer, "_RETRY_S", 0.02)
    world = World(tmp_path)
    router = world.router()
    name = await router.create([line(text) for text in TEXTS])
    await eventually(lambda: world.num_open == 4)
    return world, router, name


def on(router: Router, name: str, do: Callable[[Connection], None]) -> None:
    """Does something at each begin or commit of a transaction."""
    connections: Any = router.store.database._connections
    event.listen(connections._engine, name, do)


async def check_ended(router: Router, name: str) -> None:
    found = await router.ended(name)
    await check_files(router, found, TEXTS)
    assert found["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    await router.close()


async def test_a_disk_that_is_full_holds_a_batch_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world, router, name = await begun(tmp_path, monkeypatch)
    most = [1]
    on(router, "begin", lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={most[0]}").close())
    world.may_go.set()
    await eventually(lambda: "is full" in caplog.text)
    assert (await router.batch(name))["status"] == "in_progress"
    most[0] = 1 << 30
    await check_ended(router, name)


async def test_a_database_that_another_program_holds_does_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world, router, name = await begun(tmp_path, monkeypatch)
    router.store.database._timeout_s = 0.1
    other = sqlite3.connect(tmp_path / "batches.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    world.may_go.set()
    await eventually(lambda: caplog.text.count("the store of") >= 2)
    other.execute("ROLLBACK")
    other.close()
    await check_ended(router, name)


async def test_what_a_slow_disk_kept_after_all_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit that takes longer than the time of a transaction, and succeeds."""
    world, router, name = await begun(tmp_path, monkeypatch)
    database = router.store.database
    num_slow = 0

    def slowly(_: Connection) -> None:
        nonlocal num_slow
        if num_slow < 2:
            num_slow += 1
            time.sleep(0.3)

    on(router, "commit", slowly)
    database._timeout_s = 0.1
    world.may_go.set()
    await eventually(lambda: "did not answer in time" in caplog.text)
    database._timeout_s = TIMEOUT_S
    await check_ended(router, name)
    assert world.answers.total() == 12


async def test_a_spoiled_database_is_named(
    cluster: Cluster, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.write_bytes(b"no database " * 1000)
    router = await cluster.router(await cluster.decode(), batch_store=f"sqlite:///{store}")
    async with client_of(router) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.files.list()
    assert refused.value.status_code == 503
    assert f"the store of files and batches at {store} failed: " in caplog.text
    assert "SQLITE_NOTADB" in caplog.text
    await router.text({"model": "demo", "prompt": "all else goes on"})


async def test_a_node_that_dies_in_a_batch_costs_no_line(
    router: RunningRouter, client: openai.AsyncOpenAI, node: ChatNode, decode: FakeDecodeNode
) -> None:
    node.may_go.clear()
    batch = await make(client, [line(text) for text in TEXTS])
    await eventually(lambda: node.num_open > 0)
    await decode.stop()
    node.may_go.set()
    await decode.restart()
    batch = await ended(client, batch)
    assert batch.status == "completed"
    assert set(await content(client, batch.output_file_id)) == set(TEXTS)


async def test_lines_without_an_end_share_the_room_of_bodies(tmp_path: Path) -> None:
    size, chunk, num_uploads = 256 << 10, 16 << 10, 40
    room, most = BodyRoom(size), 0
    router = World(tmp_path).router()

    def sender() -> Sender:
        async def receive() -> Message:
            nonlocal most
            most = max(most, room.num_used)
            await asyncio.sleep(0)
            return {"type": "http.request", "body": next(chunks), "more_body": True}

        begin = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        chunks = chain([begin], repeat(b"x" * chunk))
        return Sender(receive=receive, lease=room.lease, part_timeout_s=1.0)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    uploads = [router.files.create(ANYONE.name, headers, sender()) for _ in range(num_uploads)]
    found = await asyncio.gather(*uploads, return_exceptions=True)
    assert {type(one) for one in found} <= {RequestTimeout, RequestTooLarge}
    assert most <= size + router.store.limits.max_line_bytes + num_uploads * chunk
    assert room.num_used == 0
    await router.close()


@pytest.mark.parametrize("boundary", ["x" * 300, "x" * 8000])
async def test_an_odd_boundary_is_refused(router: RunningRouter, boundary: str) -> None:
    kind = f"multipart/form-data; boundary={boundary}"
    answer: aiohttp.ClientResponse
    async with router.client.post(
        f"{router.url}/v1/files", data=b"--x", headers={"content-type": kind}
    ) as answer:
        assert answer.status == 400, await answer.text()


async def test_a_line_of_very_many_values_is_refused_before_it_is_read(
    client: openai.AsyncOpenAI,
) -> None:
    lines = [line("a"), line("b")]
    lines[1]["body"]["many"] = {str(number): 0 for number in range(70_000)}
    batch = await ended(client, await make(client, lines))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data
    [fault] = batch.errors.data
    assert (fault.code, fault.line, fault.param) == ("invalid_value", 2, "body")
    assert fault.message and "strings" in fault.message
