"""Responses are kept: retrieved, gone on from, deleted, within walls and bounds."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.http import headers as names
from router.app import create_app
from router.config import RouterSettings
from router.edge.key_file import digest_of
from router.errors import ConfigurationError
from router.responses.expiry import sweep_responses
from router.store import responses
from router.store.sql import disk_room
from router.store.sql.transaction import Transaction
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.fakes import FakeDecodeNode
from tests.router.responses.api import Api, kept_of, rows, said
from tests.router.responses.node import ResponseNode

Json = dict[str, Any]


async def test_a_response_is_kept_before_the_client_has_it(api: Api) -> None:
    made = await api.create("hello", instructions="be kind")
    assert made["id"].startswith("resp_") and made["store"] is True
    assert await api("GET", f"responses/{made['id']}") == made


async def test_a_stream_is_kept_as_its_last_event_tells(api: Api) -> None:
    events = await api.events("responses", {"model": "demo", "input": "hi", "stream": True})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert events[0]["response"]["id"] == last["id"]
    assert await api("GET", f"responses/{last['id']}") == last


async def test_a_node_gets_the_history_as_if_the_client_had_sent_it(
    api: Api, node: ResponseNode
) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [],
               "content": [{"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
    node.extra = [thought, call]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    first_input = [{"role": "user", "content": [{"type": "input_text", "text": "look"}, image]}]
    first = await api.create(first_input, instructions="only here")
    result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    second = await api.create([result], previous_response_id=first["id"])
    third = await api.create("and?", previous_response_id=second["id"], instructions="new")
    last_input = {"role": "user", "content": "and?"}
    whole = [*first_input, *first["output"], result, *second["output"], last_input]
    assert node.bodies[-1] == {"model": "demo", "input": whole, "instructions": "new"}
    assert "instructions" not in node.bodies[1]
    assert third["previous_response_id"] == second["id"]


async def test_nothing_is_written_where_nothing_is_to_be_kept(
    api: Api, node: ResponseNode, store: Path
) -> None:
    first = await api.create("one")
    before = rows(store)
    second = await api.create("two", store=False, previous_response_id=first["id"])
    assert len(node.bodies[-1]["input"]) == 3
    assert second["previous_response_id"] == first["id"] and second["store"] is False
    await api.create("three", store=False)
    assert node.bodies[-1] == {"model": "demo", "input": "three", "store": False}
    assert rows(store) == before


async def test_a_previous_response_that_is_not_there_is_a_400(api: Api) -> None:
    for name in ("resp_unknown", "with space", "x" * 5000, "\0"):
        body = await api.create(previous_response_id=name, status=400)
        assert body["error"]["code"] == "previous_response_not_found"
        assert body["error"]["param"] == "previous_response_id"


async def test_deletion_is_complete(api: Api, store: Path) -> None:
    first = await api.create("SECRET-WORD")
    second = await api.create("more", previous_response_id=first["id"])
    gone = await api("DELETE", f"responses/{first['id']}")
    assert gone == {"id": first["id"], "object": "response", "deleted": True}
    await api("GET", f"responses/{first['id']}", status=404)
    await api("DELETE", f"responses/{first['id']}", status=404)
    assert await api("GET", f"responses/{second['id']}") == second
    body = await api.create("on", previous_response_id=second["id"], status=400)
    assert first["id"] in body["error"]["message"]
    await api("DELETE", f"responses/{second['id']}")
    assert rows(store) == 0
    with sqlite3.connect(store) as database:
        assert database.execute("SELECT num_bytes FROM tandem_tenants").fetchall() == [(0,)]


async def test_input_items_are_listed_in_pages_with_what_came_before(api: Api) -> None:
    first = await api.create("one")
    second = await api.create("two", previous_response_id=first["id"])
    path = f"responses/{second['id']}/input_items"
    listed = await api("GET", path, order="asc")
    assert [item["content"][0]["text"] for item in listed["data"]] == ["one", "seen 1", "two"]
    assert all(item["type"] == "message" and item["id"] for item in listed["data"])
    page = await api("GET", path, limit="2")
    assert page["has_more"] and page["first_id"] == listed["last_id"]
    rest = await api("GET", path, limit="2", after=page["last_id"])
    assert not rest["has_more"] and rest["data"] == [listed["data"][0]]
    await api("GET", path, limit="0", status=400)
    await api("GET", path, order="up", status=400)


async def test_items_may_be_named(api: Api, node: ResponseNode) -> None:
    first = await api.create("one")
    item = first["output"][0]
    named = {"type": "item_reference", "id": item["id"]}
    await api.create([{"role": "user", "content": "one"}, named, {"role": "user", "content": "2"}])
    assert node.bodies[-1]["input"][1] == item
    await api.create([named], previous_response_id=first["id"])
    assert len(node.bodies[-1]["input"]) == 2
    body = await api.create([{"type": "item_reference", "id": "msg_none"}], status=400)
    assert body["error"]["param"] == "input.0.id"


async def test_tenants_are_walled_off(
    cluster: Cluster, decode: FakeDecodeNode, store: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(
        f'[[tenants]]\nname = "{name}"\nkeys = ["sha256:{digest_of(f"key-{name}").hex()}"]\n'
        for name in "ab"
    ))  # fmt: skip
    router = await cluster.router(decode, response_store=f"sqlite:///{store}", api_key_file=file)
    mine, other = Api(router, "key-a"), Api(router, "key-b")
    made = await mine.create("mine")
    talk = await mine("POST", "conversations", {"items": [{"role": "user", "content": "x"}]})
    (item,) = (await mine("GET", f"conversations/{talk['id']}/items"))["data"]
    for method, path in [
        ("GET", f"responses/{made['id']}"),
        ("DELETE", f"responses/{made['id']}"),
        ("POST", f"responses/{made['id']}/cancel"),
        ("GET", f"responses/{made['id']}/input_items"),
        ("GET", f"conversations/{talk['id']}"),
        ("DELETE", f"conversations/{talk['id']}"),
        ("GET", f"conversations/{talk['id']}/items"),
        ("GET", f"conversations/{talk['id']}/items/{item['id']}"),
        ("DELETE", f"conversations/{talk['id']}/items/{item['id']}"),
    ]:
        body = await other(method, path, status=404)
        assert made["id"] in body["error"]["message"] or talk["id"] in body["error"]["message"]
    await other.create(previous_response_id=made["id"], status=400)
    await other.create(conversation=talk["id"], status=404)
    named = {"type": "item_reference", "id": made["output"][0]["id"]}
    await other.create([named], status=400)
    assert await mine("GET", f"responses/{made['id']}") == made


async def test_what_has_expired_is_not_there_and_then_gone(
    api: Api, router: RunningRouter, store: Path
) -> None:
    first = await api.create("one")
    second = await api.create("two", previous_response_id=first["id"])
    alone = await api.create("alone")
    kept = kept_of(router)
    now = kept.clock()
    kept.clock = lambda: now + kept.limits.ttl_s * 0.5
    third = await api.create("three", previous_response_id=second["id"])
    kept.clock = lambda: now + kept.limits.ttl_s * 1.2
    await api("GET", f"responses/{alone['id']}", status=404)
    # A chain lives as long as its last response.
    await api.create("four", previous_response_id=third["id"])
    while await sweep_responses(kept):
        pass
    with sqlite3.connect(store) as database:
        found = {row[0] for row in database.execute("SELECT id FROM tandem_responses")}
    assert alone["id"] not in found and {first["id"], second["id"], third["id"]} < found


async def test_a_full_disk_takes_deletions_and_then_more(
    api: Api, router: RunningRouter, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite writes deletions to its log first: what had expired kept a full disk full for good."""
    capacity = 4 << 20

    def statvfs(_: object) -> SimpleNamespace:
        used = sum(file.stat().st_size for file in store.parent.iterdir())
        return SimpleNamespace(f_frsize=1, f_blocks=capacity, f_bavail=max(0, capacity - used))

    monkeypatch.setattr(disk_room, "os", SimpleNamespace(statvfs=statvfs, strerror=os.strerror))
    text, kept, now = "x" * 300_000, kept_of(router), 0.0
    kept.clock = lambda: now
    num_made = 0
    while statvfs(store).f_bavail >= capacity // 4:
        await api.create(text)
        num_made += 1
        await kept.database.forget_deleted()
    refused = await api.create(text, status=503)
    assert refused["error"]["code"] == "response_store_unavailable" and num_made > 3
    await api.create(text, store=False)
    now += kept.limits.ttl_s * 1.2
    while await sweep_responses(kept):
        pass
    for _ in range(num_made - 1):
        await kept.database.forget_deleted()
        await api.create(text)


async def test_what_expires_on_a_full_disk_goes_one_by_one_where_all_do_not_fit(
    api: Api, router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("a", "b", "c"):
        await api.create(text)
    kept = kept_of(router)
    now, write = kept.clock(), kept.database.write
    kept.clock = lambda: now + kept.limits.ttl_s * 1.2
    dropped = Counter[str]()
    drop = responses.drop_response

    def fits_one(transaction: Transaction, tenant: str, name: str) -> None:
        if dropped["now"]:
            raise OSError(errno.ENOSPC, "database or disk is full")
        dropped["now"] += 1
        drop(transaction, tenant, name)

    async def counted(work: Callable[[Transaction], Any]) -> Any:
        dropped["now"] = 0
        return await write(work)

    monkeypatch.setattr(responses, "drop_response", fits_one)
    monkeypatch.setattr(kept.database, "write", counted)
    assert [await sweep_responses(kept) for _ in range(4)] == [1, 1, 1, 0]


async def test_a_tenant_keeps_so_much_and_no_more(api: Api, router: RunningRouter) -> None:
    kept = kept_of(router)
    kept.limits = replace(kept.limits, max_bytes_per_tenant=100, max_item_bytes=2000)
    made = await api.create("x" * 200)
    body = await api.create("more", status=429)
    assert body["error"]["code"] == "insufficient_quota"
    await api("POST", "conversations", {}, status=429)
    await api.create("more", store=False)
    await api("DELETE", f"responses/{made['id']}")
    await api.create("fits")
    kept.limits = replace(kept.limits, max_bytes_per_tenant=0)
    body = await api.create("y" * 3000, status=413)
    assert body["error"]["param"] == "input.0"


async def test_a_history_that_nodes_would_not_take_is_a_413(
    cluster: Cluster, decode: FakeDecodeNode, store: Path
) -> None:
    router = await cluster.router(decode, response_store=f"sqlite:///{store}", max_body_bytes=2000)
    api = Api(router)
    first = await api.create("x" * 1500)
    await api.create("y" * 1500, previous_response_id=first["id"], status=413)


async def test_a_database_that_is_away_stops_only_what_needs_it(
    cluster: Cluster, decode: FakeDecodeNode, node: ResponseNode
) -> None:
    router = await cluster.router(
        decode, response_store="postgresql://nobody@127.0.0.1:1/none", response_store_timeout_s=1
    )
    api = Api(router)
    for call in (
        api.create(status=503),
        api.create(store=True, background=True, status=503),
        api("GET", "responses/resp_1", status=503),
        api("POST", "conversations", {}, status=503),
    ):
        body = await call
        assert body["error"]["type"] == "service_unavailable"
        assert body["error"]["code"] == "response_store_unavailable"
    assert not node.bodies
    assert said(await api.create(store=False)) == "seen 2" or node.bodies
    assert router.metric("tandem_router_store_failures_total", kind="read") >= 2


async def test_an_answer_that_cannot_be_kept_is_not_told_as_kept_nor_logged(
    api: Api, node: ResponseNode, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node.may_go.clear()
    whole = asyncio.create_task(api.create("SECRET-WORD", status=503))
    stream = asyncio.create_task(
        api.events("responses", {"model": "demo", "input": "hi", "stream": True})
    )
    await eventually(lambda: len(node.bodies) == 2)
    with sqlite3.connect(store) as database:
        database.execute("DROP TABLE tandem_items")
    node.may_go.set()
    assert (await whole)["error"]["code"] == "response_store_unavailable"
    last = (await stream)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["sequence_number"] == 4
    assert "no such table" in caplog.text and "SECRET-WORD" not in caplog.text


async def test_a_client_that_leaves_leaves_nothing(
    api: Api, node: ResponseNode, router: RunningRouter, store: Path
) -> None:
    talk = await api("POST", "conversations", {})
    node.may_go.clear()
    asking = asyncio.create_task(api.create(conversation=talk["id"]))
    await eventually(lambda: len(node.bodies) == 1)
    await api.create(conversation=talk["id"], status=409)
    asking.cancel()
    await eventually(lambda: node.num_cut == 1)
    node.may_go.set()
    await eventually(lambda: not kept_of(router).locks)
    assert said(await api.create("2", conversation=talk["id"])) == "seen 1"


async def test_a_refusal_of_the_node_is_passed_on_and_nothing_is_kept(
    api: Api, node: ResponseNode, store: Path
) -> None:
    node.refusals = [400]
    assert (await api.create(status=400))["error"]["message"] == "no"
    assert rows(store) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"store": "yes"},
        {"background": 1},
        {"previous_response_id": 7},
        {"previous_response_id": "", "store": False},
        {"conversation": []},
        {"conversation": {"id": 5}},
        {"previous_response_id": "a", "conversation": "b"},
        {"background": True, "store": False},
        {"conversation": "conv_1", "store": False},
        {"input": 7},
        {"input": [7]},
        {"input": ["text"]},
        pytest.param(
            {"input": [{"role": "user", "content": ""}] * 5000}, id="more than nodes take"
        ),
    ],
    ids=str,
)
async def test_fields_of_state_that_are_wrong_are_a_400(
    api: Api, node: ResponseNode, fields: Json
) -> None:
    text = fields.get("input", "hi")
    body = await api.create(**{"text": text, **fields, "status": 400})
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["param"]
    assert not node.bodies


@pytest.mark.parametrize("path", ["input_tokens", "compact"])
async def test_counts_and_summaries_are_of_all_that_came_before_and_keep_nothing(
    api: Api, node: ResponseNode, store: Path, path: str
) -> None:
    first = await api.create("one")
    before = rows(store)
    body = {"model": "demo", "input": "two", "previous_response_id": first["id"]}
    await api("POST", f"responses/{path}", body)
    assert len(node.bodies[-1]["input"]) == 3
    await api("POST", f"responses/{path}", {"previous_response_id": first["id"]})
    assert len(node.bodies[-1]["input"]) == 2
    assert rows(store) == before


async def test_clients_cannot_say_what_only_a_router_may(
    cluster: Cluster, decode: FakeDecodeNode
) -> None:
    router = await cluster.router(decode)
    async with router.post(
        {"model": "demo", "input": "hi"}, path="/v1/responses", **{names.RESPONSE: '{"id":"x"}'}
    ):
        pass
    assert names.RESPONSE not in decode.requests[-1][0]


@pytest.mark.parametrize(
    "url", ["sqlite://", "mysql://a/b", "nothing", "postgresql://host", "sqlite:////no/such/file"]
)
def test_a_store_that_cannot_be_is_named_at_the_start(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--response-store"):
        create_app(RouterSettings(response_store=url))


def test_a_file_that_may_not_be_written_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a volume of another user; the first response would fail otherwise."""
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigurationError, match=f"{tmp_path} may not be written"):
        create_app(RouterSettings(batch_store=f"sqlite:///{tmp_path}/batches.db"))
