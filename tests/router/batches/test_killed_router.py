"""A router process that is killed, and the next one at the same file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai

from tests.router.batches.node import ChatNode, line
from tests.router.batches.test_batches import content, ended, make
from tests.router.cluster import TIMEOUT_S
from tests.router.fakes import FakeDecodeNode
from tests.router.processes import ready_line, router_process

NUM_LINES = 40


async def test_a_batch_outlives_its_router_and_no_line_is_there_twice(
    decode: FakeDecodeNode, node: ChatNode, store: Path
) -> None:
    arguments = ("--decode", decode.entry, "--batch-store", f"sqlite:///{store}")
    arguments += ("--batch-idle-window-s", "0.05", "--batch-lease-s", "0.5")
    async with (
        router_process(*arguments) as process,
        client_at((await ready_line(process))["port"]) as client,
    ):
        batch = await make(client, [line(f"t{i}") for i in range(NUM_LINES)])
        async with asyncio.timeout(TIMEOUT_S):
            while (counts := (await client.batches.retrieve(batch.id)).request_counts) is None or (
                counts.completed < 3
            ):
                await asyncio.sleep(0.01)
        node.may_go.clear()
        process.kill()
        await process.wait()
    node.may_go.set()
    async with (
        router_process(*arguments) as process,
        client_at((await ready_line(process))["port"]) as client,
    ):
        batch = await ended(client, batch)
        assert batch.status == "completed"
        output = await content(client, batch.output_file_id)
        assert set(output) == {f"t{i}" for i in range(NUM_LINES)}
        assert batch.request_counts is not None
        assert batch.request_counts.completed == NUM_LINES


def client_at(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
