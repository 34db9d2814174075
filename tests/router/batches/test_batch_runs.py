"""Batches that outlive routers: each line is answered once, whatever ends in between.

Runs work on a real store; the API is a function, the clock is a number, and a router is killed by
leaving its tasks to nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from edge.http.bodies.body_room import BodyRoom
from router.batches.batch_calls import BatchCalls
from router.batches.batch_store import BatchStore
from router.batches.expiry import sweep_batches
from router.batches.files.file_calls import FileCalls
from router.batches.files.upload import Sender
from router.batches.runs.answer import Answering
from router.batches.runs.batch_runs import BatchRuns
from router.batches.runs.idle_room import IdleRoom
from router.batches.settings import BatchLimits
from router.observe.batch_metrics import BatchTotals
from router.request.model_route import plain_route
from router.request.tenants import ANYONE
from router.store.files import ListQuery, account
from router.store.sql.database import Database
from tests.router.batches.node import Json, jsonl, line
from tests.router.cluster import TIMEOUT_S

LEASE_S = 3.0
ENDED = ("completed", "failed", "expired", "cancelled")


class AllSpare:
    """Has room for everything."""

    def look(self) -> None: ...

    def free_tokens(self, model: str) -> int:
        return 1 << 30

    def num_rooms(self, model: str) -> int:
        return 1 << 20


@dataclass
class World:
    """Holds what routers share: the store, the clock, and nodes that answer when `may_go`.
    `answers` counts answers that were given, by the request's text."""

    folder: Path
    now: float = 1000.0
    answers: Counter[str] = field(default_factory=Counter)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    num_open: int = 0
    left: list[asyncio.Task[None]] = field(default_factory=list)

    def router(self) -> Router:
        return Router(self)

    async def api(self, scope: Scope, receive: Receive, send: Send) -> None:
        message: Message = await receive()
        body = json.loads(message["body"])
        text = body["messages"][-1]["content"]
        self.num_open += 1
        try:
            await self.may_go.wait()
        finally:
            self.num_open -= 1
        found = self.statuses.get(text) or [200]
        status = found.pop(0) if len(found) > 1 else found[0]
        self.answers[text] += 1
        answer = msgspec.json.encode({"said": text} if status == 200 else {"error": {}})
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": answer})


class Router:
    """Is the part of a router that runs batches."""

    def __init__(self, world: World) -> None:
        self.world = world
        url = f"sqlite:///{world.folder / 'batches.db'}"
        limits = BatchLimits(lease_s=LEASE_S, max_concurrent=4)
        database = Database(url, 30.0, lambda kind, seconds, has_failed: None)
        self.store = BatchStore(database, limits, clock=lambda: world.now)
        room = IdleRoom(AllSpare(), 4)  # type: ignore[arg-type]
        table: Any = SimpleNamespace(route=plain_route)
        self.runs = BatchRuns(
            store=self.store,
            answering=Answering(world.api, BatchTotals(), pause_s=0.001),
            room=room,
            tenants=lambda: {ANYONE.name: ANYONE},
            table=lambda: table,
            rng=random.Random(1),
        )
        self.files = FileCalls(self.store)
        self.calls = BatchCalls(self.store, self.runs.wake)
        self.tasks = [asyncio.create_task(room.run()), asyncio.create_task(self.runs.watch())]

    async def upload(self, data: bytes) -> str:
        form = (
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        ) + data
        parts = [form[i : i + 997] for i in range(0, len(form), 997)] + [b"\r\n--b--\r\n"]
        messages = [{"type": "http.request", "body": p, "more_body": True} for p in parts]
        messages[-1]["more_body"] = False
        given = iter(messages)

        async def receive() -> Message:
            return next(given)

        headers = {"content-type": "multipart/form-data; boundary=b"}
        sender = Sender(receive=receive, lease=BodyRoom(1 << 20).lease, part_timeout_s=TIMEOUT_S)
        return str(json.loads(await self.files.create(ANYONE.name, headers, sender))["id"])

    async def create(self, lines: list[Json], window: str = "24h") -> str:
        body = {
            "input_file_id": await self.upload(jsonl(lines)),
            "endpoint": "/v1/chat/completions",
            "completion_window": window,
        }
        return str(
            json.loads(await self.calls.create(ANYONE.name, json.dumps(body).encode()))["id"]
        )

    async def batch(self, name: str) -> Json:
        found: Json = json.loads(await self.calls.retrieve(ANYONE.name, name))
        return found

    async def ended(self, name: str) -> Json:
        async with asyncio.timeout(TIMEOUT_S):
            while (found := await self.batch(name))["status"] not in ENDED:
                await asyncio.sleep(0.005)
        return found

    async def lines(self, name: str | None) -> list[Json]:
        if name is None:
            return []
        _, content = await self.files.content(ANYONE.name, name)
        data = b"".join([part async for part in content])
        return [json.loads(one) for one in data.splitlines()]

    async def kill(self) -> None:
        """Ends all that it does at once, without a word to the store."""
        for task in [*self.tasks, *self.runs._tasks.values()]:
            task.cancel()
        await asyncio.gather(*self.tasks, *self.runs._tasks.values(), return_exceptions=True)
        await self.store.database.close()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.runs.close()
        await self.store.database.close()


@contextlib.asynccontextmanager
async def world_of(folder: Path) -> Any:
    yield World(folder)


async def check_files(router: Router, found: Json, texts: list[str]) -> None:
    """Checks that each line is in one of the two files once, and that the counts say so."""
    output = await router.lines(found["output_file_id"])
    errors = await router.lines(found["error_file_id"])
    counts = found["request_counts"]
    names = [one["custom_id"] for one in (*output, *errors)]
    assert len(names) == len(set(names))
    assert (counts["completed"], counts["failed"]) == (len(output), len(errors))
    assert set(names) <= set(texts)
    if found["status"] in ("completed", "expired"):
        assert sorted(names) == sorted(texts)
    for one in output:
        assert one["response"]["body"] == {"said": one["custom_id"]}


Steps = st.lists(
    st.sampled_from(["kill", "stop", "pause", "go", "late", "cancel", "second"]), max_size=6
)
Statuses = st.lists(st.sampled_from([200, 400, 429, 500, 503]), min_size=1, max_size=4)


@settings(max_examples=12, deadline=None)
@given(steps=Steps, statuses=st.lists(Statuses, min_size=1, max_size=9))
def test_each_line_is_answered_once_whatever_ends(
    steps: list[str], statuses: list[list[int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_whatever_ends(Path(folder), steps, statuses))


async def _whatever_ends(folder: Path, steps: list[str], statuses: list[list[int]]) -> None:
    texts = [f"t{i}" for i in range(len(statuses))]
    world = World(folder, statuses=dict(zip(texts, statuses, strict=True)))
    # A node that has no room for ever would keep the batch open.
    for found in world.statuses.values():
        if found[-1] in (429, 503):
            found.append(200)
    routers = [world.router()]
    world.may_go.set()
    name = await routers[0].create([line(text) for text in texts])
    for step in steps:
        await asyncio.sleep(0.01)
        if step in ("kill", "stop"):
            await (routers[0].kill() if step == "kill" else routers[0].close())
            world.now += LEASE_S + 1
            routers = [*routers[1:], world.router()]
        elif step == "second":
            routers.append(world.router())
        elif step in ("pause", "go"):
            world.may_go.clear() if step == "pause" else world.may_go.set()
        elif step == "late":
            world.now += 25 * 3600
        elif step == "cancel":
            with contextlib.suppress(Exception):
                await routers[0].calls.cancel(ANYONE.name, name)
    world.may_go.set()
    found = await routers[0].ended(name)
    await check_files(routers[0], found, texts)
    is_ended_by = {"cancelled": "cancel", "expired": "late"}
    assert found["status"] == "completed" or is_ended_by[found["status"]] in steps
    for router in routers:
        await router.close()
    assert world.num_open == 0


async def test_a_killed_router_s_batch_is_gone_on_with_at_the_line(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.may_go.set()
    first = world.router()
    texts = [f"t{i}" for i in range(40)]
    name = await first.create([line(text) for text in texts])
    async with asyncio.timeout(TIMEOUT_S):
        while (await first.batch(name))["request_counts"]["completed"] < 8:
            await asyncio.sleep(0.005)
    world.may_go.clear()
    await asyncio.sleep(0.2)
    kept = (await first.batch(name))["request_counts"]["completed"]
    await first.kill()
    second = world.router()
    world.may_go.set()
    world.now += LEASE_S + 1
    found = await second.ended(name)
    await check_files(second, found, texts)
    assert found["request_counts"]["completed"] == 40
    assert world.answers.total() <= 40 + 8
    assert kept >= 8
    await second.close()


async def test_two_routers_share_batches_and_no_line(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.may_go.set()
    routers = [world.router(), world.router()]
    names = [await routers[i % 2].create([line(f"{i}-{j}") for j in range(5)]) for i in range(4)]
    for i, name in enumerate(names):
        await check_files(routers[0], await routers[0].ended(name), [f"{i}-{j}" for j in range(5)])
    assert set(world.answers.values()) == {1}
    for router in routers:
        await router.close()


async def test_a_batch_that_is_late_ends_with_what_it_has(tmp_path: Path) -> None:
    world = World(tmp_path)
    router = world.router()
    name = await router.create([line("a"), line("b")], window="1h")
    async with asyncio.timeout(TIMEOUT_S):
        while not world.num_open:
            await asyncio.sleep(0.005)
    world.now += 3601
    found = await router.ended(name)
    assert (found["status"], found["request_counts"]["failed"]) == ("expired", 2)
    assert found["expires_at"] - found["created_at"] == 3600
    codes = [one["error"]["code"] for one in await router.lines(found["error_file_id"])]
    assert codes == ["batch_expired"] * 2
    await router.close()


async def test_what_has_expired_is_removed_with_its_bytes(tmp_path: Path) -> None:

    world = World(tmp_path)
    world.may_go.set()
    router = world.router()
    await router.ended(await router.create([line("a")]))
    sweep = partial(sweep_batches, router.store)

    def num_bytes() -> Any:
        return router.store.database.read(lambda one: one.num_bytes_of(account(ANYONE.name)))

    await sweep()
    assert await num_bytes() > 0
    world.now += 62 * 86400
    assert await sweep() == 3
    assert await num_bytes() == 0
    assert json.loads(await router.calls.list_all(ANYONE.name, ListQuery()))["data"] == []
    await router.close()
