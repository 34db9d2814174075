"""Batches as the openai client uses them, from the upload to the files of answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from openai.types import Batch

from router.edge.key_file import digest_of
from tests.router.batches.conftest import FAST, client_of
from tests.router.batches.node import ChatNode, Json, jsonl, line
from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.fakes import FakeDecodeNode

ENDED = {"completed", "failed", "expired", "cancelled"}


async def make(client: openai.AsyncOpenAI, lines: list[Json] | bytes, **changes: Any) -> Batch:
    data = lines if isinstance(lines, bytes) else jsonl(lines)
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    asked: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **changes}
    return await client.batches.create(input_file_id=file.id, **asked)


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(TIMEOUT_S):
        while batch.status not in ENDED:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def content(client: openai.AsyncOpenAI, name: str | None) -> dict[str, Json]:
    """Returns the lines of a file by their custom_id, which no two share."""
    assert name is not None
    text = (await client.files.content(name)).text
    lines = [json.loads(one) for one in text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


async def test_a_batch_from_its_file_to_its_answers(
    client: openai.AsyncOpenAI, node: ChatNode
) -> None:
    node.status_of = lambda text, times: 400 if text == "b" else 200
    batch = await make(client, [line(name) for name in "abc"], metadata={"night": "1"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"night": "1"})
    batch = await ended(client, batch)
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1)
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (6, 4)
    assert batch.usage.input_tokens_details.cached_tokens == 2
    assert batch.model == "demo"
    output = await content(client, batch.output_file_id)
    assert set(output) == {"a", "c"}
    response = output["a"]["response"]
    assert (response["status_code"], output["a"]["error"]) == (200, None)
    assert response["body"]["choices"][0]["message"]["content"] == "seen a"
    assert response["request_id"]
    errors = await content(client, batch.error_file_id)
    assert errors["b"]["response"]["status_code"] == 400
    assert errors["b"]["response"]["body"]["error"]["message"] == "no: b"
    assert {body["priority"] for body in node.bodies} == {2**31 - 1}


async def test_files_come_back_as_they_went_and_end(client: openai.AsyncOpenAI) -> None:
    data = b'{"a": 1}\r\n' * 40_000 + b"last"
    lifetime: Any = {"anchor": "created_at", "seconds": 3600}
    file = await client.files.create(
        file=("x.jsonl", data), purpose="batch", expires_after=lifetime
    )
    assert (file.bytes, file.filename, file.purpose) == (len(data), "x.jsonl", "batch")
    assert file.expires_at == file.created_at + 3600
    assert (await client.files.content(file.id)).content == data
    assert (await client.files.wait_for_processing(file.id)).status == "processed"
    other = await client.files.create(file=b"", purpose="batch")
    assert [one.id async for one in client.files.list(limit=1)] == [other.id, file.id]
    assert [one.id async for one in client.files.list(order="asc")] == [file.id, other.id]
    assert [one.id async for one in client.files.list(purpose="batch_output")] == []
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (b"", "empty_file", None),
        (jsonl([line("a")]) + b"{oops\n", "invalid_json_line", 2),
        (jsonl([line("a")]) + b"[1]\n", "invalid_json_line", 2),
        (jsonl([line("a"), line("a")]), "duplicate_custom_id", 2),
        (jsonl([line("a", method=...)]), "missing_required_parameter", 1),
        (jsonl([line("a", url="/v1/completions")]), "url_mismatch", 1),
        (jsonl([line("a"), line("b", body={"model": "other"})]), "model_mismatch", 2),
        (jsonl([line("a", body={"model": "unknown"})]), "model_not_found", 1),
        (jsonl([line("a", body={"model": "demo", "stream": True})]), "unsupported_parameter", 1),
        (jsonl([line(str(i)) for i in range(11)]), "too_many_tasks", None),
    ],
)
async def test_a_file_with_a_mistake_fails_with_the_line(
    cluster: Cluster, decode: FakeDecodeNode, store: Any, lines: bytes, code: str, number: int
) -> None:
    router = await cluster.router(
        decode, batch_store=f"sqlite:///{store}", batch_max_requests=10, **FAST
    )
    async with client_of(router) as client:
        batch = await ended(client, await make(client, lines))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, number)]
    assert batch.output_file_id is None


async def test_a_cancelled_batch_keeps_what_was_answered(
    client: openai.AsyncOpenAI, node: ChatNode
) -> None:
    batch = await make(client, [line(str(i)) for i in range(4)])
    batch = await ended(client, batch)
    node.may_go.clear()
    batch = await make(client, [line(str(i)) for i in range(4)])
    await eventually(lambda: node.num_open > 0)
    batch = await client.batches.cancel(batch.id)
    assert batch.status == "cancelling"
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    assert batch.output_file_id is None
    await eventually(lambda: node.num_open == 0)
    with pytest.raises(openai.NotFoundError):
        await client.batches.cancel("batch_none")


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_batch_of_no_input_names_the_field(
    client: openai.AsyncOpenAI, is_there: bool
) -> None:
    batch = await ended(client, await make(client, [line("a")]))
    name = batch.output_file_id if is_there else "file-none"
    assert name is not None
    with pytest.raises(openai.APIStatusError) as refused:
        await client.batches.create(
            input_file_id=name, endpoint="/v1/chat/completions", completion_window="24h"
        )
    assert refused.value.status_code == (400 if is_there else 404)
    assert refused.value.param == "input_file_id"


async def test_refusals_and_faults_are_tried_again(
    client: openai.AsyncOpenAI, node: ChatNode, router: RunningRouter
) -> None:
    """A node that is full is asked until it is not; one that fails, three times."""

    def status_of(text: str, times: int) -> int:
        if text == "full":
            return 503 if times < 4 else 200
        return 500 if text == "broken" or times < 2 else 200

    node.status_of = status_of
    router.server.config.app.state.batches.runs.answering.pause_s = 0.01  # type: ignore[union-attr]
    batch = await ended(client, await make(client, [line(n) for n in ("full", "shaky", "broken")]))
    assert set(await content(client, batch.output_file_id)) == {"full", "shaky"}
    errors = await content(client, batch.error_file_id)
    assert errors["broken"]["response"]["status_code"] == 500
    assert node.asked["broken"] == 3


async def test_tenants_see_their_own_and_have_limits(
    cluster: Cluster, decode: FakeDecodeNode, tmp_path: Any
) -> None:
    names = ("red", "blue")
    entries = [
        f'[[tenants]]\nname = "{name}"\nkeys = ["sha256:{digest_of(name).hex()}"]\n'
        for name in names
    ]
    keys = tmp_path / "keys.toml"
    keys.write_text("\n".join(entries))
    router = await cluster.router(
        decode,
        batch_store=f"sqlite:///{tmp_path / 'b.db'}",
        api_key_file=keys,
        batch_store_mib_per_tenant=1,
        batch_max_per_tenant=1,
        batch_idle_window_s=1000.0,
    )
    async with client_of(router, "red") as red, client_of(router, "blue") as blue:
        batch = await make(red, [line("a")])
        assert not [one async for one in blue.files.list()]
        assert not [one async for one in blue.batches.list()]
        for call in (
            blue.files.retrieve(batch.input_file_id),
            blue.files.content(batch.input_file_id),
            blue.batches.retrieve(batch.id),
            blue.batches.cancel(batch.id),
            blue.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.RateLimitError, match="1 batches"):
            await make(red, [line("b")])
        with pytest.raises(openai.RateLimitError, match="bytes together"):
            await red.files.create(file=b"x\n" * (1 << 19), purpose="batch")
        with pytest.raises(openai.ConflictError):
            await red.files.delete(batch.input_file_id)
        await make(blue, [line("b")])
        assert [one.id async for one in red.batches.list(limit=1)] == [batch.id]


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"purpose": "batch"}, "field 'file'"),
        ({"purpose": "fine-tune", "file": b"x"}, "purpose must be"),
        ({"file": b"x"}, "purpose must be"),
        ({"purpose": "batch", "expires_after[seconds]": "5", "file": b"x"}, "expires_after"),
    ],
)
async def test_a_form_with_a_mistake_is_refused_and_nothing_kept(
    router: RunningRouter, client: openai.AsyncOpenAI, form: dict[str, Any], told: str
) -> None:
    data = aiohttp.FormData()
    for name, value in form.items():
        data.add_field(name, value, **({"filename": "f"} if name == "file" else {}))
    async with router.client.post(
        f"{router.url}/v1/files",
        data=data
        if "file" in form
        else aiohttp.FormData([*form.items()], default_to_multipart=True),
    ) as answer:
        assert answer.status == 400, await answer.text()
        assert told in await answer.text()
    assert not [one async for one in client.files.list()]


async def test_operators_see_batches(
    client: openai.AsyncOpenAI, node: ChatNode, router: RunningRouter
) -> None:
    node.may_go.clear()
    batch = await make(client, [line("a"), line("b")])
    await eventually(lambda: node.num_open > 0)
    assert router.metric("tandem_router_batches", status="in_progress") == 1
    assert router.metric("tandem_router_batch_requests_open") == 2
    async with router.client.get(f"{router.url}/status?format=json") as answer:
        [shown] = (await answer.json())["batches"]
    assert (shown["id"], shown["total"], shown["completed"]) == (batch.id, 2, 0)
    node.may_go.set()
    await ended(client, batch)
    assert router.metric("tandem_router_batch_requests_total", outcome="completed") == 2
    await eventually(lambda: router.metric("tandem_router_batches", status="in_progress") == 0)
