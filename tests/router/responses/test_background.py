"""Responses in the background: polled, streamed from anywhere, cancelled, and taken over."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterSettings
from tests.router.cluster import TIMEOUT_S, Cluster, eventually, run_router
from tests.router.fakes import FakeDecodeNode
from tests.router.responses.api import Api, Json, events_of, rows, said
from tests.router.responses.node import ResponseNode


async def until(api: Api, name: str, *statuses: str) -> Json:
    """Polls until the response has one of these statuses."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            found = await api("GET", f"responses/{name}")
            if found["status"] in statuses:
                return found
            await asyncio.sleep(0.02)


def streamed(api: Api, name: str, **query: str) -> Any:
    return api.events(f"responses/{name}", stream="true", **query)


@pytest.fixture
async def other(cluster: Cluster, decode: FakeDecodeNode, store: Path, api: Api) -> Api:
    """Asks another router on the same store."""
    return Api(await cluster.router(decode, response_store=f"sqlite:///{store}"))


async def test_a_response_is_polled(api: Api, node: ResponseNode) -> None:
    node.may_go.clear()
    made = await api.create("hi", background=True, instructions="x")
    assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
    assert made["model"] == "demo" and made["instructions"] == "x"
    await until(api, made["id"], "in_progress")
    node.may_go.set()
    done = await until(api, made["id"], "completed")
    assert said(done) == "seen 1" and done["background"] is True
    assert done["id"] == made["id"] and done["created_at"] == made["created_at"]
    await api.create("more", previous_response_id=made["id"])
    assert len(node.bodies[-1]["input"]) == 3
    body = await api("GET", f"responses/{made['id']}", stream="true", status=400)
    assert body["error"]["param"] == "stream"


async def test_an_unfinished_response_is_not_gone_on_from(api: Api, node: ResponseNode) -> None:
    node.may_go.clear()
    made = await api.create("hi", background=True)
    body = await api.create(previous_response_id=made["id"], status=400)
    assert body["error"]["param"] == "previous_response_id"
    node.may_go.set()
    await until(api, made["id"], "completed")


async def test_a_stream_is_gone_on_with_from_any_event_on_any_router(
    api: Api, other: Api, node: ResponseNode
) -> None:
    node.may_go.clear()
    url = f"{api.router.url}/v1/responses"
    body = {"model": "demo", "input": "hi", "background": True, "stream": True}
    async with api.router.client.post(url, json=body) as response:
        text = ""
        while "response.output_text.delta" not in text:
            text += (await response.content.readuntil(b"\n\n")).decode()
    events = events_of(text)
    assert [event["type"] for event in events] == [
        "response.created", "response.queued", "response.in_progress", "response.output_text.delta",
    ]  # fmt: skip
    name = events[0]["response"]["id"]
    following = [
        asyncio.create_task(streamed(one, name, starting_after=after))
        for one in (api, other) for after in ("1", "3")
    ]  # fmt: skip
    await asyncio.sleep(0)
    node.may_go.set()
    whole = await streamed(api, name)
    assert [event["sequence_number"] for event in whole] == list(range(6))
    assert whole[-1]["type"] == "response.completed"
    assert whole[-1]["response"] == await other("GET", f"responses/{name}")
    assert whole[:4] == events
    for task, first in zip(following, (2, 4, 2, 4), strict=True):
        assert await task == whole[first:]
    assert await streamed(other, name, starting_after="5") == []
    assert await streamed(other, name) == whole


async def test_cancel_ends_the_work_on_the_node(
    api: Api, other: Api, node: ResponseNode, store: Path
) -> None:
    node.may_go.clear()
    for number, one in enumerate((api, other), 1):
        made = await api.create("hi", background=True, stream=False)
        await until(api, made["id"], "in_progress")
        ended = await one("POST", f"responses/{made['id']}/cancel")
        assert ended["status"] == "cancelled"
        await eventually(lambda number=number: node.num_cut == number)  # type: ignore[misc]
        assert (await api("GET", f"responses/{made['id']}"))["status"] == "cancelled"
        again = await one("POST", f"responses/{made['id']}/cancel")
        assert again["status"] == "cancelled"
    made = await api.create("hi", background=True, stream=False)
    await until(api, made["id"], "in_progress")
    await other("DELETE", f"responses/{made['id']}")
    await eventually(lambda: node.num_cut == 3)
    node.may_go.set()


async def test_only_what_is_in_the_background_can_be_cancelled(api: Api) -> None:
    made = await api.create("hi")
    await api("POST", f"responses/{made['id']}/cancel", status=400)


async def test_a_stream_that_is_cancelled_ends(api: Api, node: ResponseNode, store: Path) -> None:
    node.may_go.clear()
    body = {"model": "demo", "input": "hi", "background": True, "stream": True}
    asking = asyncio.create_task(api.events("responses", body))
    await eventually(lambda: len(node.bodies) == 1)
    with sqlite3.connect(store) as database:
        ((name,),) = database.execute("SELECT id FROM tandem_responses").fetchall()
    await api("POST", f"responses/{name}/cancel")
    assert "completed" not in (await asking)[-1]["type"]
    node.may_go.set()


async def test_no_room_is_waited_for_and_other_refusals_are_told(
    api: Api, node: ResponseNode
) -> None:
    node.refusals = [429]
    made = await api.create("hi", background=True)
    await until(api, made["id"], "completed")
    node.refusals = [400]
    made = await api.create("hi", background=True)
    failed = await until(api, made["id"], "failed")
    assert failed["error"] == {"code": "invalid_prompt", "message": "no"}
    await api.create("hi", background=True, model="none", status=404)


async def test_what_no_node_would_answer_is_refused_before_it_is_kept(
    api: Api, node: ResponseNode, store: Path
) -> None:
    talk = await api("POST", "conversations", {})
    node.check_refusals = [400, 422]
    for status in (400, 422):
        body = await api.create(
            "hi", status, background=True, stream=status == 422, conversation=talk["id"]
        )
        error = {"message": "not that", "type": "t", "param": "text.format", "code": "c"}
        assert body["error"] == error
    assert rows(store) == 1 and not node.bodies
    made = await api.create("hi", background=True, conversation=talk["id"])
    await until(api, made["id"], "completed")
    assert [one["input"] for one in node.checked] == [node.bodies[0]["input"]] * 3


async def test_a_node_that_cannot_say_now_refuses_nothing(api: Api, node: ResponseNode) -> None:
    node.check_refusals = [429, 503, 503, 503, 503]
    for _ in range(2):
        made = await api.create("hi", background=True)
        await until(api, made["id"], "completed")


async def test_a_check_costs_a_tenant_nothing(
    cluster: Cluster, decode: FakeDecodeNode, node: ResponseNode, store: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"sk-one").hexdigest()
    keys = tmp_path / "keys"
    keys.write_text(
        f'[[tenants]]\nname = "one"\nkeys = ["sha256:{digest}"]\nrequests_per_s = 0.1\n'
    )
    url = f"sqlite:///{store}"
    router = await cluster.router(decode, response_store=url, api_key_file=str(keys))
    api = Api(router, "sk-one")
    made = await api.create("hi", background=True)
    await until(api, made["id"], "completed")


async def test_a_background_response_adds_to_its_conversation(api: Api, node: ResponseNode) -> None:
    talk = await api("POST", "conversations", {})
    node.may_go.clear()
    made = await api.create("hi", background=True, conversation=talk["id"])
    await api.create("no", conversation=talk["id"], status=409)
    await api("POST", f"responses/{made['id']}/cancel")
    made = await api.create("hi", background=True, conversation=talk["id"])
    node.may_go.set()
    await until(api, made["id"], "completed")
    await api.create("on", conversation=talk["id"])
    assert len(node.bodies[-1]["input"]) == 3


async def test_so_many_are_worked_on_and_no_more(
    cluster: Cluster, decode: FakeDecodeNode, node: ResponseNode, store: Path
) -> None:
    url = f"sqlite:///{store}"
    api = Api(await cluster.router(decode, response_store=url, max_background_responses=1))
    node.may_go.clear()
    made = await api.create("hi", background=True)
    assert (await api.create("hi", background=True, status=503))["error"]["code"] == "overloaded"
    node.may_go.set()
    await until(api, made["id"], "completed")
    await eventually(lambda: not api.router.metric("tandem_router_background_responses"))
    await api.create("hi", background=True)


async def test_a_router_that_stops_hands_its_work_over(
    cluster: Cluster, decode: FakeDecodeNode, node: ResponseNode, store: Path
) -> None:
    """Nothing of a plain response was told, so it is answered again; a stream has to fail."""
    settings: Json = {"response_store": f"sqlite:///{store}", "response_lease_s": 1.5}
    other = Api(await cluster.router(decode, **settings))
    node.may_go.clear()
    leaving = RouterSettings(port=0, decode=decode.entry, drain_timeout_s=0.1, **settings)
    async with run_router(leaving) as running:
        await running.wait_usable(decode=1, prefill=0)
        first = Api(running)
        plain = await first.create("hi", background=True, metadata={"a": "b"})
        told = await first.create_stream("hi")
        await until(other, plain["id"], "in_progress")
        await until(other, told, "in_progress")
        running.server.should_exit = True
    node.may_go.set()
    done = await until(other, plain["id"], "completed", "failed")
    assert done["status"] == "completed" and said(done) == "seen 1"
    failed = await until(other, told, "completed", "failed")
    assert failed["status"] == "failed" and "router" in failed["error"]["message"]
    events = await streamed(other, told)
    assert events[-1]["type"] == "response.failed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_an_owner_that_was_silent_too_long_gives_its_work_up(
    cluster: Cluster, decode: FakeDecodeNode, node: ResponseNode, store: Path
) -> None:
    """Its row has another owner: what it still answers is not written."""
    settings: Json = {"response_store": f"sqlite:///{store}", "response_lease_s": 1.5}
    api = Api(await cluster.router(decode, **settings))
    node.may_go.clear()
    made = await api.create("hi", background=True)
    await until(api, made["id"], "in_progress")
    with sqlite3.connect(store) as database:
        database.execute("UPDATE tandem_responses SET owner = 'x', attempt = 7, lease_until = 0")
    await eventually(lambda: node.num_cut == 1)
    failed = await until(api, made["id"], "failed")
    assert "routers worked on it" in failed["error"]["message"]
    node.may_go.set()
