"""Routers share one PostgreSQL: what one keeps the other has, and one gets what both want."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from router.store.sql import shared_clock
from router.store.sql.database import Database
from router.store.sql.shared_clock import SharedClock
from router.store.sql.transaction import Transaction
from tests.postgres_server import needs_postgres, run_postgres
from tests.router.cluster import Cluster, eventually
from tests.router.fakes import FakeDecodeNode
from tests.router.fault_proxy import FaultProxy
from tests.router.responses.api import Api, Json, kept_of, said
from tests.router.responses.node import ResponseNode
from tests.router.responses.test_background import streamed, until


@needs_postgres
async def test_routers_judge_leases_by_the_time_of_the_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host of one is an hour ahead: it would take all that others work on."""
    ahead = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    monkeypatch.setattr(shared_clock, "time", ahead)
    async with run_postgres() as server:
        database = Database(server.url, 30.0, lambda kind, seconds, has_failed: None)
        found = await database.read(lambda one: database.clock())
        await database.close()
        assert abs(found - time.time()) < 600
        monkeypatch.setattr(ahead, "time", lambda: 0.0)
        assert abs(database.clock() - time.time()) < 600, "the host's clock was set meanwhile"
        own = Database("sqlite:////tmp/any.db", 30.0, lambda kind, seconds, has_failed: None)
        assert own.clock() == 0.0


def test_the_database_is_asked_for_its_time_until_it_has_answered() -> None:
    """Meanwhile, and behind a question without an answer, nothing goes on by the host's time."""
    clock, was_due = SharedClock(is_shared=True), list[bool]()

    def execute(query: object) -> SimpleNamespace:
        was_due.append(clock.is_due)
        if len(was_due) == 1:
            raise TimeoutError
        return SimpleNamespace(scalar_one=lambda: 1e9)

    connection: Any = SimpleNamespace(execute=execute)
    with pytest.raises(TimeoutError):
        clock.look(connection)
    clock.look(connection)
    assert was_due == [True, True]
    assert not clock.is_due and 0 <= clock() - 1e9 < 60


@needs_postgres
async def test_connections_that_the_network_has_lost_fail_no_request() -> None:
    """Neither end is told of it: one that is asked over such a connection gets another in time."""
    failures: list[bool] = []
    async with run_postgres() as server, FaultProxy(server.port) as proxy:
        url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        database = Database(url, 4.0, lambda kind, seconds, has_failed: failures.append(has_failed))

        def work(transaction: Transaction) -> None:
            transaction.execute(text("SELECT pg_sleep(0.2)"))

        await asyncio.gather(*(database.read(work) for _ in range(3)))
        proxy.lose()
        for _ in range(4):
            await database.read(work)
        proxy.lose()
        await asyncio.gather(*(database.read(work) for _ in range(3)))
        assert failures == [False] * 10
        await database.close()


@needs_postgres
async def test_two_routers_share_a_database_that_may_restart(
    cluster: Cluster, decode: FakeDecodeNode, node: ResponseNode
) -> None:
    async with run_postgres() as server:
        settings: Json = {"response_store": server.url, "response_lease_s": 1.5}
        routers = await asyncio.gather(*(cluster.router(decode, **settings) for _ in range(2)))
        one, other = map(Api, routers)
        await _share(one, other)
        await _race(one, other, node)
        await _take_over(one, other, node)
        made = await one.create("kept")
        await server.stop()
        error = (await other("GET", f"responses/{made['id']}", status=503))["error"]
        assert error["code"] == "response_store_unavailable"
        await one.create("as ever", store=False)
        await server.start()
        assert await other("GET", f"responses/{made['id']}") == made


async def _share(one: Api, other: Api) -> None:
    """Both make the tables at once; each sees what the other keeps."""
    first, second = await asyncio.gather(one.create("one"), other.create("two"))
    kept = kept_of(one.router)
    assert kept.clock is kept.database.clock
    assert await other("GET", f"responses/{first['id']}") == first
    third = await other.create("three", previous_response_id=first["id"])
    assert said(third) == "seen 3"
    await one("DELETE", f"responses/{second['id']}")
    await other("GET", f"responses/{second['id']}", status=404)


async def _race(one: Api, other: Api, node: ResponseNode) -> None:
    """One of many gets the conversation; the rest are told."""
    talk = await one("POST", "conversations", {})
    node.may_go.clear()
    body = {"model": "demo", "input": "mine", "conversation": talk["id"]}
    asking = [asyncio.create_task(_status(api, body)) for api in (one, other) for _ in range(4)]
    await eventually(lambda: sum(task.done() for task in asking) == len(asking) - 1)
    node.may_go.set()
    assert sorted(await asyncio.gather(*asking)) == [200, *[409] * 7]
    await asyncio.gather(*(
        api("POST", f"conversations/{talk['id']}/items", {"items": [{"role": "user",
            "content": "x"}]})
        for api in (one, other) for _ in range(4)
    ))  # fmt: skip
    listed = await one("GET", f"conversations/{talk['id']}/items", limit="100")
    assert len(listed["data"]) == 10
    await asyncio.gather(*(api.create("many") for api in (one, other) for _ in range(8)))


async def _status(api: Api, body: Json) -> int:
    url = f"{api.router.url}/v1/responses"
    async with api.router.client.post(url, json=body) as response:
        return int(response.status)


async def _take_over(one: Api, other: Api, node: ResponseNode) -> None:
    """A router that renews no lease loses its work to the other."""
    node.may_go.clear()
    plain = await one.create("hi", background=True)
    told = await one.create_stream("hi")
    await until(one, plain["id"], "in_progress")
    await until(one, told, "in_progress")
    kept = kept_of(one.router)
    clock, kept.clock = kept.clock, lambda: 0.0
    await eventually(lambda: node.num_cut >= 2)
    node.may_go.set()
    kept.clock = clock
    done = await until(other, plain["id"], "completed")
    assert said(done) == "seen 1"
    await until(other, told, "failed")
    assert (await streamed(other, told))[-1]["type"] == "response.failed"
