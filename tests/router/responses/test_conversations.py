"""Conversations keep items, and give them to the responses that belong to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.store.items import Item, Page, page_of
from tests.router.cluster import Cluster, eventually
from tests.router.fakes import FakeDecodeNode
from tests.router.responses.api import Api, rows, said
from tests.router.responses.node import ResponseNode

USER = {"role": "user", "content": "hello"}


async def texts(api: Api, name: str) -> list[str]:
    listed = await api("GET", f"conversations/{name}/items", order="asc", limit="100")
    return [item["content"][0]["text"] for item in listed["data"]]


async def test_a_conversation_has_its_life(api: Api, store: Path) -> None:
    made = await api("POST", "conversations", {"metadata": {"a": "1"}, "items": [USER]})
    assert made["object"] == "conversation" and made["metadata"] == {"a": "1"}
    path = f"conversations/{made['id']}"
    assert await api("GET", path) == made
    changed = await api("POST", path, {"metadata": {"b": "2"}})
    assert changed == {**made, "metadata": {"b": "2"}}
    added = await api("POST", f"{path}/items", {"items": [USER, {**USER, "content": "more"}]})
    assert len(added["data"]) == 2 and not added["has_more"]
    assert await texts(api, made["id"]) == ["hello", "hello", "more"]
    item = added["data"][1]
    assert await api("GET", f"{path}/items/{item['id']}") == item
    assert (await api("DELETE", f"{path}/items/{item['id']}"))["id"] == made["id"]
    await api("GET", f"{path}/items/{item['id']}", status=404)
    assert await texts(api, made["id"]) == ["hello", "hello"]
    gone = await api("DELETE", path)
    assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    await api("GET", path, status=404)
    assert rows(store) == 0


async def test_a_conversation_may_be_made_of_nothing(api: Api) -> None:
    assert (await api("POST", "conversations"))["metadata"] == {}


async def test_responses_add_to_their_conversation(api: Api, node: ResponseNode) -> None:
    talk = await api("POST", "conversations", {"items": [USER]})
    first = await api.create("one", conversation=talk["id"])
    assert first["conversation"] == {"id": talk["id"]}
    body = {"model": "demo", "input": "two", "stream": True, "conversation": {"id": talk["id"]}}
    await api.events("responses", body)
    assert [len(body["input"]) for body in node.bodies] == [2, 4]
    assert await texts(api, talk["id"]) == ["hello", "one", "seen 2", "two", "seen 4"]
    # What belongs to a conversation goes on in it.
    body = await api.create(previous_response_id=first["id"], status=400)
    assert talk["id"] in body["error"]["message"]
    await api("DELETE", f"conversations/{talk['id']}")
    assert said(await api("GET", f"responses/{first['id']}")) == "seen 2"


async def test_one_response_at_a_time_adds_to_a_conversation(api: Api, node: ResponseNode) -> None:
    talk = await api("POST", "conversations", {})
    node.may_go.clear()
    asking = asyncio.create_task(api.create("one", conversation=talk["id"]))
    await eventually(lambda: len(node.bodies) == 1)
    body = await api.create("two", conversation=talk["id"], status=409)
    assert body["error"]["code"] == "conversation_locked"
    node.may_go.set()
    await asking
    await api.create("two", conversation=talk["id"])
    assert await texts(api, talk["id"]) == ["one", "seen 1", "two", "seen 3"]


async def test_a_conversation_that_is_deleted_meanwhile_stays_deleted(
    api: Api, node: ResponseNode, store: Path
) -> None:
    talk = await api("POST", "conversations", {})
    node.may_go.clear()
    asking = asyncio.create_task(api.create("one", conversation=talk["id"]))
    await eventually(lambda: len(node.bodies) == 1)
    await api("DELETE", f"conversations/{talk['id']}")
    node.may_go.set()
    made = await asking
    await api("DELETE", f"responses/{made['id']}")
    assert rows(store) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("conversations", {"metadata": {"a": 1}}),
        ("conversations", {"metadata": {"a" * 65: "x"}}),
        ("conversations", {"metadata": {"a": "x" * 513}}),
        ("conversations", {"metadata": {str(i): "" for i in range(17)}}),
        ("conversations", {"metadata": []}),
        ("conversations", {"items": "text"}),
        ("conversations", {"items": [USER] * 21}),
        ("conversations", {"items": [3]}),
        ("conversations", {"items": [{"type": "item_reference", "id": "msg_1"}]}),
        ("items", {}),
        ("items", {"items": []}),
    ],
    ids=str,
)
async def test_what_a_conversation_does_not_take_is_a_400(
    api: Api, path: str, body: dict[str, Any], store: Path
) -> None:
    talk = await api("POST", "conversations", {})
    place = f"conversations/{talk['id']}/items" if path == "items" else path
    assert (await api("POST", place, body, status=400))["error"]["param"]
    assert await texts(api, talk["id"]) == []


async def test_a_conversation_grows_as_long_as_a_response_could_read_it(
    cluster: Cluster, decode: FakeDecodeNode, store: Path
) -> None:
    api = Api(
        await cluster.router(decode, response_store=f"sqlite:///{store}", max_body_bytes=2000)
    )
    talk = await api("POST", "conversations", {})
    added = {"items": [{"role": "user", "content": "x" * 1500}]}
    await api("POST", f"conversations/{talk['id']}/items", added)
    error = (await api("POST", f"conversations/{talk['id']}/items", added, status=413))["error"]
    assert error["param"] == "items"


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(0, 12),
    limit=st.integers(1, 5),
    is_ascending=st.booleans(),
)
def test_pages_are_the_list(count: int, limit: int, is_ascending: bool) -> None:
    items = [Item(f"i{n}", b"{}") for n in range(count)]
    found: list[Item] = []
    has_more, after = True, ""
    while has_more:
        page = Page(limit=limit, is_ascending=is_ascending, after=after)
        part, has_more = page_of(items, page)
        assert len(part) == limit or not has_more
        found += part
        after = part[-1].id if part else ""
    assert found == (items if is_ascending else items[::-1])
    assert page_of(items, Page(after="none")) == ([], False)
